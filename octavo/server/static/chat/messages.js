// The messages of a talk on the page: each with its text, its files, its calls, and what can be done with it.

import { copyButton, count, element, iconButton, many, seconds } from "../shared/common.js";
import { icon } from "../shared/icons.js";
import { MarkdownView } from "../markdown/render.js";
import { children } from "./tree.js";
import { OddsView } from "./odds.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

// Keeps a list of messages on the page in step with a talk. `actions`: what the buttons do.
export class TalkView {
  constructor(root, actions) {
    Object.assign(this, { root, actions });
    this.views = new Map(); // id → MessageView
    this.talk = null;
  }

  show(talk, path) {
    if (talk !== this.talk) {
      this.root.replaceChildren();
      this.views.clear();
      this.talk = talk;
    }
    const wanted = new Set(path.map((node) => node.id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      view.card.remove();
      this.views.delete(id);
    }
    path.forEach((node, place) => {
      let view = this.views.get(node.id);
      if (!view) this.views.set(node.id, (view = new MessageView(node, this.actions)));
      if (this.root.children[place] !== view.card) this.root.insertBefore(view.card, this.root.children[place] ?? null);
      view.update(talk, node, place === path.length - 1);
    });
  }

  get(id) {
    return this.views.get(id);
  }
}

class MessageView {
  constructor(node, actions) {
    this.actions = actions;
    this.node = node;
    this.hasOdds = false; // whether the odds are shown instead of the formatted text
    this.thought = element("details", { class: "thought hidden" }, element("summary", { text: "Reasoning" }), (this.thoughtText = element("div", { class: "words" })));
    this.body = element("div", { class: node.role === "assistant" ? "text markdown" : "text words" });
    this.calls = element("div", { class: "calls" });
    this.files = element("div", { class: "files" });
    this.note = element("div", { class: "note hidden", role: "alert" });
    this.bar = element("div", { class: "bar" });
    this.card = element("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": NAMES[node.role] }, this.thought, this.files, this.body, this.calls, this.note, this.bar);
    if (node.role === "tool") this.card.prepend(element("div", { class: "who", text: NAMES.tool }));
    this.markdown = new MarkdownView(this.body);
    this.due = false;
  }

  update(talk, node, isLast) {
    Object.assign(this, { talk, node });
    this.isLast = isLast;
    this.card.classList.toggle("last", isLast);
    this.card.setAttribute("aria-busy", String(this.actions.isRunning(node)));
    this.card.classList.toggle("waiting", this.actions.isRunning(node) && !node.text && !node.thought && !node.calls?.length);
    this.write();
    this.files.replaceChildren(...(node.files || []).map(fileCard));
    this.thought.classList.toggle("hidden", !node.thought);
    if (node.thought) this.thoughtText.textContent = node.thought;
    this.showCalls();
    this.note.classList.toggle("hidden", !node.note);
    this.note.textContent = node.note || "";
    this.showBar();
  }

  // Called for every chunk; the page is written at most once a frame.
  grow() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.update(this.talk, this.node, this.isLast);
      this.actions.grown();
    });
  }

  write() {
    const { node } = this;
    if (node.role !== "assistant") {
      if (this.body.textContent !== node.text) this.body.textContent = node.text;
    } else if (this.hasOdds) this.odds.update(node);
    else this.markdown.update(node.text);
    this.body.classList.toggle("hidden", !node.text && !this.hasOdds);
  }

  showOdds(isWanted) {
    this.hasOdds = isWanted;
    this.body.replaceChildren();
    this.body.className = isWanted ? "text words odds" : "text markdown";
    this.odds?.hide();
    if (isWanted) this.odds = new OddsView(this.body);
    else {
      this.odds?.leave();
      this.odds = null;
      this.markdown = new MarkdownView(this.body);
    }
    this.write();
    this.showBar();
  }

  showCalls() {
    const { calls = [] } = this.node, answered = this.talk ? children(this.talk, this.node.id).length > 0 : false;
    const shape = JSON.stringify([calls, answered, this.actions.isRunning(this.node)]);
    if (shape === this.shape) return; // fields that a person is filling stay
    this.shape = shape;
    const canAnswer = calls.length && !answered && !this.actions.isRunning(this.node) && this.isLast;
    const fields = calls.map((call) => element("textarea", { rows: 1, "aria-label": `result of ${call.function.name}`, placeholder: `What ${call.function.name} answers` }));
    this.calls.replaceChildren(
      ...calls.map((call, place) => element("div", { class: "call" }, element("div", { class: "who" }, "calls ", element("b", { text: call.function.name })), element("pre", { text: call.function.arguments }), ...(canAnswer ? [fields[place]] : []))),
      ...(canAnswer ? [element("button", { type: "button", text: "Send results", onclick: () => this.actions.sendResults(this.node, fields.map((field) => field.value)) })] : []),
    );
  }

  showBar() {
    const { node, talk, actions } = this;
    const isRunning = actions.isRunning(node), siblings = talk ? children(talk, node.parent) : [];
    const parts = [];
    if (siblings.length > 1) {
      const at = siblings.findIndex((other) => other.id === node.id);
      const step = (by, name, sign) => iconButton(sign, name, () => actions.choose(siblings[at + by]), at + by < 0 || at + by >= siblings.length || actions.isBusy() ? { disabled: "" } : {});
      parts.push(element("span", { class: "siblings" }, step(-1, "Previous version", "left"), element("span", { class: "number", text: `${at + 1}/${siblings.length}` }), step(1, "Next version", "right")));
    }
    if (!isRunning && node.role !== "tool") {
      parts.push(copyButton("Copy", () => node.text));
      if (node.role === "user") parts.push(iconButton("edit", "Edit and send again", () => this.edit()));
      if (node.role === "assistant") {
        parts.push(iconButton("again", "Answer again", () => actions.regenerate(node)));
        if (actions.canContinue(node) && this.isLast) parts.push(element("button", { type: "button", class: "text-button", onclick: () => actions.resume(node) }, icon("forward"), "Continue"));
        parts.push(iconButton("odds", this.hasOdds ? "Show the formatted text" : "Show the odds of each token", () => this.showOdds(!this.hasOdds), { "aria-pressed": String(this.hasOdds) }));
        parts.push(iconButton("pulse", "Inspect: times, journey, request as code", () => actions.inspect(node)));
        parts.push(element("span", { class: "stats number", text: statsOf(node) }));
      }
    }
    const shape = parts.map((part) => part.outerHTML).join("");
    if (shape === this.barShape) return; // the focus stays where it is
    this.barShape = shape;
    this.bar.replaceChildren(...parts);
  }

  // A field in place of the question. Sending makes a sibling; the earlier version stays.
  edit(text = this.node.text) {
    if (this.card.querySelector(".editor")) return;
    const field = element("textarea", { "aria-label": "Edit your message", rows: Math.min(12, text.split("\n").length + 1) });
    field.value = text;
    const close = () => {
      editor.remove();
      this.body.classList.toggle("hidden", !this.node.text);
      this.bar.classList.remove("hidden");
    };
    const send = () => {
      if (!field.value.trim() || this.actions.isBusy()) return;
      close();
      this.actions.edit(this.node, field.value.trim());
    };
    const editor = element("form", { class: "editor", onsubmit: (event) => { event.preventDefault(); send(); } }, field,
      element("div", { class: "row" }, element("button", { type: "button", text: "Cancel", onclick: close }), element("button", { class: "main", text: "Send" })));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.body.classList.add("hidden");
    this.bar.classList.add("hidden");
    this.card.insertBefore(editor, this.calls);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

export function statsOf({ usage, times, reason }) {
  const parts = [];
  if (usage?.out) parts.push(many(usage.out, "token"));
  if (times?.rate) parts.push(`${times.rate < 10 ? times.rate.toFixed(1) : count(times.rate)} tokens/s`);
  if (times?.first) parts.push(`first after ${seconds(times.first)}`);
  if (reason === "length") parts.push("reached the limit");
  return parts.join(" · ");
}

function fileCard({ name, text }) {
  const lines = text.split("\n").length;
  return element("details", { class: "file" }, element("summary", {}, icon("file"), element("span", { text: name }), element("span", { class: "faint", text: many(lines, "line") })), element("pre", { text, tabindex: 0, "aria-label": name }));
}
