// One answer on the screen: its text token by token with what else was likely, its thoughts, its tool calls.
// Knows nothing of requests or controls: chunks come in, a card grows.

import { element } from "./common.js";

export class Answer {
  constructor(tip) {
    this.text = "";
    this.thought = "";
    this.calls = []; // as the API tells them
    this.started = false;
    this.isStopped = false;
    this.usage = null;
    this.reason = "";
    this.tip = tip;
    this.thoughtBox = element("div", { class: "thought hidden" });
    this.textBox = element("div", { class: "text" });
    this.callBox = element("div", {});
    this.card = element("article", { class: "message assistant" }, element("div", { class: "who", text: "assistant" }), this.thoughtBox, this.textBox, this.callBox);
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {};
      const thought = delta.reasoning_content || delta.reasoning;
      if (thought) this.think(thought);
      if (delta.content) this.write(delta.content, choice.logprobs?.content);
      for (const call of delta.tool_calls || []) this.call(call);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
  }

  think(piece) {
    this.started = true;
    this.thought += piece;
    this.thoughtBox.classList.remove("hidden");
    this.thoughtBox.textContent = this.thought;
  }

  write(piece, tokens) {
    this.started = true;
    this.text += piece;
    // Tokens' texts and the piece agree but where a character lies across tokens: then the piece is right.
    const isWhole = tokens?.length && tokens.map((token) => token.token).join("") === piece;
    if (!isWhole) this.textBox.append(tokens?.length === 1 ? this.span(piece, tokens[0]) : piece);
    else for (const token of tokens) this.textBox.append(this.span(token.token, token));
  }

  span(text, token) {
    const span = element("span", { class: "token", text });
    span.style.opacity = (0.55 + 0.45 * Math.exp(token.logprob)).toFixed(2); // doubtful tokens are paler
    const told = [token, ...token.top_logprobs.filter((other) => other.token !== token.token)]
      .map((other) => `${JSON.stringify(other.token)} ${(Math.exp(other.logprob) * 100).toFixed(1)} %`);
    span.addEventListener("pointerenter", (event) => this.hover(event, told));
    span.addEventListener("pointerleave", () => this.tip.classList.add("hidden"));
    span.title = told[0];
    return span;
  }

  hover(event, told) {
    this.tip.replaceChildren(...told.map((line) => element("div", { text: line })));
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 240)}px`;
    this.tip.style.top = `${event.clientY + 14}px`;
    this.tip.classList.remove("hidden");
  }

  call(piece) {
    this.started = true;
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.function.name = piece.function.name;
    if (piece.function?.arguments) call.function.arguments += piece.function.arguments;
    this.callBox.replaceChildren(
      ...this.calls.map(({ function: { name, arguments: given } }) => element("div", { class: "call" }, element("b", { text: name }), element("pre", { text: given }))),
    );
  }

  // Fields for what the tools answer; `onGiven` gets the messages.
  askResults(onGiven) {
    const fields = this.calls.map((call, place) => {
      const field = element("textarea", { rows: 1, "aria-label": `result of ${call.function.name}`, placeholder: `what ${call.function.name} answers` });
      this.callBox.children[place].append(field);
      return field;
    });
    const button = element("button", {
      type: "button",
      text: "Send results",
      onclick: () => {
        button.disabled = true;
        onGiven(this.calls.map((call, place) => ({ role: "tool", tool_call_id: call.id, content: fields[place].value })));
      },
    });
    this.callBox.append(button);
  }

  message() {
    const message = { role: "assistant", content: this.text || null };
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  fail(text) {
    this.card.append(element("div", { class: "error", role: "alert", text }));
  }

  summary() {
    const tokens = this.usage ? `${this.usage.prompt_tokens} → ${this.usage.completion_tokens} tokens` : "";
    return [`ended by ${this.reason}`, tokens].filter(Boolean).join(", ");
  }
}
