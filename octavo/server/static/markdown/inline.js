// The text of a block to a tree of inline nodes, as plain objects: text, code, maths, strong, em, del, link, image, break.
// Emphasis follows CommonMark's rules for runs of * and _. Every search is bounded, so that no text takes long.

const MAX_ADDRESS = 2000; // characters of a link's address
const MAX_DEPTH = 16; // emphasis and links inside each other
const MAX_MATHS = 1000; // characters of a formula in a line
const PUNCTUATION = /[!-/:-@[-`{-~\p{P}\p{S}]/u;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const BARE = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
const BRACKETED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;

export function parseInline(text) {
  return new Scan(text).run();
}

// Which method takes a letter that may be more than itself. It returns false where the letter is only itself.
const TAKE = new Map([["\\", "escape"], ["`", "code"], ["$", "dollar"], ["*", "delimiter"], ["_", "delimiter"], ["~", "delimiter"], ["[", "open"], ["!", "image"], ["]", "close"], ["<", "angle"], ["h", "bare"], ["&", "entity"], ["\n", "newline"]]);

class Scan {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = []; // finished nodes, and runs of delimiters that may become emphasis
    this.brackets = [];
    this.plain = "";
    this.ticks = null; // length of a run of backticks → where such runs begin
  }

  run() {
    while (this.at < this.text.length) {
      const letter = this.text[this.at];
      const take = TAKE.get(letter);
      if (!take || !this[take]()) {
        this.plain += letter;
        this.at++;
      }
    }
    this.flush();
    return emphasise(this.nodes);
  }

  flush() {
    if (this.plain) this.nodes.push({ type: "text", text: this.plain });
    this.plain = "";
  }

  push(node, length) {
    this.flush();
    this.nodes.push(node);
    this.at += length;
    return true;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const end = this.text.slice(this.at, this.at + MAX_MATHS).indexOf(next === "(" ? "\\)" : "\\]", 2);
      if (end > 2) return this.push({ type: "maths", text: this.text.slice(this.at + 2, this.at + end).trim() }, end + 2);
    }
    if (next === "\n") return this.push({ type: "break" }, 2);
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  code() {
    const length = runLength(this.text, this.at);
    this.ticks ??= backticks(this.text);
    const runs = this.ticks.get(length), from = this.at + length;
    while (runs.places[runs.next] < from) runs.next++;
    const end = runs.places[runs.next];
    if (end === undefined) {
      this.plain += "`".repeat(length);
      this.at += length;
      return true;
    }
    let inside = this.text.slice(from, end).replaceAll("\n", " ");
    if (inside.startsWith(" ") && inside.endsWith(" ") && inside.trim()) inside = inside.slice(1, -1);
    return this.push({ type: "code", text: inside }, end + length - this.at);
  }

  // $x$ is maths, $5 and $10 are not: no space inside the signs, and no digit after the second.
  dollar() {
    const mark = this.text[this.at + 1] === "$" ? "$$" : "$";
    const near = this.text.slice(this.at, this.at + MAX_MATHS);
    const end = near.indexOf(mark, mark.length);
    const inside = near.slice(mark.length, end);
    if (end <= mark.length || /^\s|\s$/.test(inside) || inside.includes("\n\n") || (mark === "$" && /\d/.test(near[end + 1] ?? ""))) return false;
    return this.push({ type: "maths", text: inside }, end + mark.length);
  }

  delimiter() {
    const letter = this.text[this.at], length = runLength(this.text, this.at);
    if (letter === "~" && length !== 2) return false;
    const before = this.text[this.at - 1] ?? " ", after = this.text[this.at + length] ?? " ";
    const isLeft = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const isRight = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const canOpen = isLeft && (letter !== "_" || !isRight || PUNCTUATION.test(before));
    const canClose = isRight && (letter !== "_" || !isLeft || PUNCTUATION.test(after));
    return this.push({ type: "run", letter, length, canOpen, canClose }, length);
  }

  open() {
    this.flush();
    this.brackets.push({ place: this.nodes.length, isImage: false });
    return this.push({ type: "text", text: "[" }, 1);
  }

  image() {
    if (this.text[this.at + 1] !== "[") return false;
    this.flush();
    this.brackets.push({ place: this.nodes.length, isImage: true });
    return this.push({ type: "text", text: "![" }, 2);
  }

  close() {
    const bracket = this.brackets.pop();
    if (!bracket || this.text[this.at + 1] !== "(") return false;
    const target = address(this.text.slice(this.at + 2, this.at + 2 + MAX_ADDRESS));
    if (!target) return false;
    this.flush();
    const inside = emphasise(this.nodes.splice(bracket.place).slice(1));
    if (!bracket.isImage) this.brackets.length = 0; // no links in links
    return this.push({ ...around(bracket.isImage ? "image" : "link", inside), address: target.address }, 2 + target.length);
  }

  angle() {
    BRACKETED.lastIndex = this.at;
    const found = BRACKETED.exec(this.text);
    return found ? this.push({ type: "link", address: found[1], nodes: [{ type: "text", text: found[1] }] }, found[0].length) : false;
  }

  bare() {
    if (/[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ")) return false;
    BARE.lastIndex = this.at;
    let found = BARE.exec(this.text)?.[0];
    if (!found || this.brackets.length) return false;
    found = found.replace(/[*_~]{1,8}$/, "");
    while (/[.,;:!?]$/.test(found) || (found.endsWith(")") && !found.includes("(")) || (found.endsWith("]") && !found.includes("["))) found = found.slice(0, -1);
    return this.push({ type: "link", address: found, nodes: [{ type: "text", text: found }] }, found.length);
  }

  entity() {
    ENTITY.lastIndex = this.at;
    const found = ENTITY.exec(this.text);
    if (!found) return false;
    const code = found[1] ? parseInt(found[1], 10) : found[2] ? parseInt(found[2], 16) : 0;
    if (!found[3] && (!code || code > 0x10ffff)) return false;
    this.plain += found[3] ? NAMED[found[3]] : String.fromCodePoint(code);
    this.at += found[0].length;
    return true;
  }

  // A line break that the model wrote is kept: verses and addresses are more frequent than wrapped lines.
  newline() {
    this.plain = this.plain.replace(/ {1,20}$/, "");
    return this.push({ type: "break" }, 1);
  }
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function backticks(text) {
  const found = new Map();
  for (let at = text.indexOf("`"); at >= 0; ) {
    const length = runLength(text, at);
    if (!found.has(length)) found.set(length, { places: [], next: 0 });
    found.get(length).places.push(at);
    at = text.indexOf("`", at + length);
  }
  return found;
}

// "address "title")" → the address, and how many characters it takes with the closing parenthesis.
function address(text) {
  let at = 0, depth = 0;
  while (text[at] === " ") at++;
  if (text[at] === "<") {
    const end = text.indexOf(">", at);
    if (end < 0) return null;
    return text[end + 1] === ")" ? { address: text.slice(at + 1, end), length: end + 2 } : null;
  }
  const start = at;
  for (; at < text.length && !/\s/.test(text[at]); at++) {
    if (text[at] === "(") depth++;
    else if (text[at] === ")" && depth-- === 0) return { address: text.slice(start, at), length: at + 1 };
  }
  const title = /^[ \n]+(?:"[^"]{0,500}"|'[^']{0,500}')[ \n]*\)/.exec(text.slice(at));
  return title ? { address: text.slice(start, at), length: at + title[0].length } : null;
}

// Turn runs of delimiters into emphasis: each closer takes the nearest opener of its kind.
function emphasise(nodes) {
  const openers = { "*": [], _: [], "~": [] };
  const out = [];
  for (const node of nodes) {
    if (node.type !== "run") {
      out.push(node);
      continue;
    }
    let left = node.length;
    const stack = openers[node.letter];
    while (left && node.canClose && stack.length) {
      const opener = stack.at(-1);
      const take = node.letter === "~" ? 2 : Math.min(left, opener.left, 2);
      for (const other of Object.values(openers)) while (other.length && other.at(-1).place > opener.place) other.pop(); // runs inside are text
      const inside = out.splice(opener.place + 1);
      out.push(around(node.letter === "~" ? "del" : take === 2 ? "strong" : "em", inside.flatMap(asText)));
      opener.left -= take;
      left -= take;
      if (!opener.left) stack.pop();
    }
    if (!left) continue;
    const run = { type: "run", letter: node.letter, left, place: out.length };
    out.push(run);
    if (node.canOpen) stack.push(run);
  }
  return out.flatMap(asText);
}

// A node around others. Beyond MAX_DEPTH those become their text: a page must not nest without end.
function around(type, nodes) {
  const depth = 1 + nodes.reduce((most, node) => Math.max(most, node.depth ?? 0), 0);
  return depth <= MAX_DEPTH ? { type, nodes, depth } : { type, nodes: [{ type: "text", text: nodes.map(textOf).join("") }], depth: 1 };
}

const textOf = (node) => node.text ?? (node.type === "break" ? "\n" : (node.nodes ?? []).map(textOf).join(""));

const asText = (node) => (node.type !== "run" ? [node] : node.left ? [{ type: "text", text: node.letter.repeat(node.left) }] : []);
