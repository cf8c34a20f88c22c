// A tree of Markdown to nodes of the page. Safe by construction: every node is made by name here, and every piece of a model's text
// becomes a text node. There is no way from a text to an element, an attribute or a handler, except for a link's address, which must
// be http, https or mailto. Images are named, never loaded.

import { copyButton, element } from "../shared/common.js";
import { parseBlocks } from "./blocks.js";
import { highlight } from "./highlight.js";
import { parseInline } from "./inline.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);

// Shows a growing text. Blocks that a longer text leaves alone keep their nodes, and with them selections and scroll positions.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.shown = []; // the source of each block on the page
  }

  update(text) {
    const lines = text.replaceAll("\r\n", "\n").split("\n");
    const blocks = parseBlocks(text);
    blocks.forEach((block, place) => {
      const source = `${block.type}\n${lines.slice(block.first, block.last).join("\n")}`;
      if (this.shown[place] === source) return;
      const node = renderBlock(block), old = this.root.children[place];
      if (old) old.replaceWith(node);
      else this.root.append(node);
      this.shown[place] = source;
    });
    while (this.root.children.length > blocks.length) this.root.lastElementChild.remove();
    this.shown.length = blocks.length;
  }
}

export const renderMarkdown = (text) => parseBlocks(text).map(renderBlock);

function renderBlock(block) {
  switch (block.type) {
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, { "data-level": block.level }, ...inline(block.text)); // the page has its own h1 and h2
    case "paragraph":
      return element("p", {}, ...inline(block.text));
    case "code":
      return codeBlock(block);
    case "maths":
      return element("div", { class: "maths", text: block.text });
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(renderBlock));
    case "rule":
      return element("hr");
    case "list":
      return listBlock(block);
    default:
      return tableBlock(block);
  }
}

function codeBlock({ language, text }) {
  const code = element("code", {}, ...highlight(text, language).map(([kind, piece]) => (kind ? element("span", { class: `code-${kind}`, text: piece }) : piece)));
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", { text: language.slice(0, 30) || "text" }), copyButton("Copy code", () => text)),
    element("pre", { tabindex: 0, "aria-label": "code" }, code),
  );
}

function listBlock({ isOrdered, start, isLoose, items }) {
  const made = items.map(({ blocks, isChecked }) => {
    const item = element("li", isChecked === null ? {} : { class: "task" });
    if (isChecked !== null) item.append(element("span", { class: "box", role: "img", "aria-label": isChecked ? "done" : "to do", text: isChecked ? "☑" : "☐" }), " ");
    for (const block of blocks) {
      if (block.type === "paragraph" && !isLoose) item.append(...inline(block.text));
      else item.append(renderBlock(block));
    }
    return item;
  });
  return isOrdered ? element("ol", start === 1 ? {} : { start }, ...made) : element("ul", {}, ...made);
}

function tableBlock({ head, aligns, rows }) {
  const cell = (tag) => (text, column) => element(tag, { class: aligns[column], ...(tag === "th" ? { scope: "col" } : {}) }, ...inline(text));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map(cell("th")))), element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))));
  return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "table" }, table);
}

const inline = (text) => parseInline(text).map(renderInline);

function renderInline(node) {
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "break":
      return element("br");
    case "code":
      return element("code", { text: node.text });
    case "maths":
      return element("span", { class: "maths", text: node.text });
    case "link":
    case "image":
      return link(node);
    default:
      return element(node.type, {}, ...node.nodes.map(renderInline)); // strong, em, del: the parser knows no others
  }
}

function link({ type, address, nodes }) {
  const inside = nodes.map(renderInline);
  const target = safeAddress(address);
  if (type === "image") inside.unshift("image: ");
  if (target === null) return element("span", {}, ...inside, element("span", { class: "faint", text: ` (${address})` }));
  return element("a", { href: target, title: target, target: "_blank", rel: "noopener noreferrer nofollow", referrerpolicy: "no-referrer" }, ...(inside.length ? inside : [target]));
}

// The address in the browser's own spelling; null: it may lead to something other than a page or a mail.
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null; // relative ones, too: they would lead to this server
  }
}
