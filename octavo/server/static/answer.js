// One answer on the screen: its text token by token with alternatives, its reasoning, its tool calls.

import { element } from "./common.js";

export class Answer {
  // `tip`: the tooltip of a token; `note`: the live region for screen readers.
  constructor(tip, note) {
    this.text = "";
    this.thought = "";
    this.calls = []; // in the API's format
    this.started = 0; // when the first piece arrived
    this.isStopped = false;
    this.isSaid = false; // whether it is in `messages`
    this.usage = null;
    this.reason = "";
    this.at = -1; // the token selected with the keyboard
    Object.assign(this, { tip, note });
    this.thoughtBox = element("div", { class: "thought hidden" });
    this.textBox = element("div", { class: "text", tabindex: 0, role: "group", "aria-label": "answer; the arrow keys show each token's probability" });
    this.callBox = element("div", {});
    this.who = element("div", { class: "who" }, element("span", { text: "assistant" }));
    this.card = element("article", { class: "message assistant", "aria-busy": "true" }, this.who, this.thoughtBox, this.textBox, this.callBox);
    this.textBox.addEventListener("keydown", (event) => this.walk(event));
    this.textBox.addEventListener("blur", () => this.hide());
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {};
      const thought = delta.reasoning_content || delta.reasoning;
      if (thought || delta.content || delta.tool_calls) this.started ||= performance.now();
      if (thought) this.think(thought);
      if (delta.content) this.write(delta.content, choice.logprobs?.content);
      for (const call of delta.tool_calls || []) this.call(call);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
  }

  think(piece) {
    this.thought += piece;
    this.thoughtBox.classList.remove("hidden");
    this.thoughtBox.textContent = this.thought;
  }

  write(piece, tokens) {
    this.text += piece;
    // The tokens' texts add up to the piece, unless a character is split over several tokens: then the piece is right.
    const isWhole = tokens?.length && tokens.map((token) => token.token).join("") === piece;
    if (!isWhole) this.textBox.append(tokens?.length === 1 ? this.span(piece, tokens[0]) : piece);
    else for (const token of tokens) this.textBox.append(this.span(token.token, token));
  }

  span(text, token) {
    const span = element("span", { class: "token", text });
    const doubt = 1 - Math.exp(token.logprob);
    span.style.borderBottomColor = `color-mix(in srgb, var(--warn) ${(100 * doubt).toFixed(0)}%, transparent)`; // unlikely tokens are underlined
    span.odds = [token, ...token.top_logprobs.filter((other) => other.token !== token.token)]
      .map((other) => `${JSON.stringify(other.token)} ${(Math.exp(other.logprob) * 100).toFixed(1)} %`);
    span.addEventListener("pointerenter", () => this.show(span));
    span.addEventListener("pointerleave", () => this.hide());
    return span;
  }

  show(span) {
    this.tip.replaceChildren(...span.odds.map((line) => element("div", { class: "number", text: line })));
    this.tip.classList.remove("hidden");
    const box = span.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - this.tip.offsetWidth - 8))}px`;
    const below = box.bottom + 6, isLow = below + this.tip.offsetHeight > innerHeight;
    this.tip.style.top = `${isLow ? box.top - this.tip.offsetHeight - 6 : below}px`;
  }

  hide() {
    this.tip.classList.add("hidden");
    this.textBox.querySelector(".at")?.classList.remove("at");
  }

  walk(event) {
    const tokens = this.textBox.querySelectorAll(".token");
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined || !tokens.length) return;
    event.preventDefault();
    this.hide();
    this.at = Math.max(0, Math.min(tokens.length - 1, to));
    const span = tokens[this.at];
    span.classList.add("at");
    span.scrollIntoView({ block: "nearest" });
    this.show(span);
    this.note.textContent = span.odds.join(", ");
  }

  call(piece) {
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.function.name = piece.function.name;
    if (piece.function?.arguments) call.function.arguments += piece.function.arguments;
    this.callBox.replaceChildren(
      ...this.calls.map(({ function: { name, arguments: given } }) => element("div", { class: "call" }, element("b", { text: name }), element("pre", { text: given }))),
    );
  }

  // Show a field for each tool's result; `onGiven` gets the messages.
  askResults(onGiven) {
    const fields = this.calls.map((call, place) => {
      const field = element("textarea", { rows: 1, "aria-label": `result of ${call.function.name}`, placeholder: `result of ${call.function.name}` });
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

  // The answer has ended, or was stopped. `show` opens its journey.
  done(show) {
    this.card.setAttribute("aria-busy", "false");
    if (this.who.childElementCount === 1) this.who.append(element("button", { type: "button", class: "plain", text: "journey", onclick: () => this.showJourney() }));
    this.showJourney = show;
  }

  fail(text) {
    this.card.append(element("div", { class: "error", role: "alert", text }));
  }

  summary() {
    const tokens = this.usage ? `${this.usage.prompt_tokens} → ${this.usage.completion_tokens} tokens` : "";
    const spent = (performance.now() - this.started) / 1000;
    const rate = this.usage?.completion_tokens > 1 && spent > 0 ? `${((this.usage.completion_tokens - 1) / spent).toFixed(0)} tokens/s` : "";
    return [`finished (${this.reason})`, tokens, rate].filter(Boolean).join(", ");
  }
}
