// The odds of each token of an answer: unlikely tokens are marked, and the pointer or the arrow keys show what else might have come.

import { element, find } from "../shared/common.js";
import { oddsOf } from "./answer.js";

export class OddsView {
  constructor(root) {
    this.root = root;
    this.at = -1; // the token selected with the keyboard
    this.numShown = 0;
    root.setAttribute("tabindex", "0");
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "answer; the arrow keys show the odds of each token");
    this.keys = (event) => this.walk(event);
    this.away = () => this.hide();
    root.addEventListener("keydown", this.keys);
    root.addEventListener("blur", this.away);
  }

  leave() {
    this.root.removeEventListener("keydown", this.keys);
    this.root.removeEventListener("blur", this.away);
    for (const name of ["tabindex", "role", "aria-label"]) this.root.removeAttribute(name);
  }

  update(node) {
    const tokens = oddsOf(node.id);
    if (!tokens) {
      this.root.replaceChildren(element("p", { class: "faint", text: "No odds were recorded for this answer: they are recorded while “Odds of each token” is on in the settings, and kept until the page is closed. Answer again to see them." }), node.text);
      return;
    }
    for (; this.numShown < tokens.length; this.numShown++) this.root.append(this.span(tokens[this.numShown]));
  }

  span({ text, logprob, others }) {
    const span = element("span", { class: "token", text });
    const doubt = Math.round(100 * (1 - Math.exp(logprob)));
    span.style.backgroundColor = `color-mix(in srgb, var(--warn) ${Math.round(doubt * 0.45)}%, transparent)`;
    span.odds = [[text, logprob], ...others];
    span.addEventListener("pointerenter", () => this.show(span));
    span.addEventListener("pointerleave", () => this.hide());
    return span;
  }

  show(span) {
    const tip = find("tip");
    tip.replaceChildren(
      ...span.odds.map(([text, logprob], place) => {
        const share = Math.exp(logprob) * 100, bar = element("i", { class: "odd-bar" });
        bar.style.width = `${Math.max(1, share * 0.8)}px`;
        return element("div", { class: `odd number${place ? "" : " taken"}` }, element("span", { text: JSON.stringify(text) }), bar, element("span", { text: `${share.toFixed(1)} %` }));
      }),
    );
    tip.classList.remove("hidden");
    const box = span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + 6, isLow = below + tip.offsetHeight > innerHeight;
    tip.style.top = `${isLow ? box.top - tip.offsetHeight - 6 : below}px`;
  }

  hide() {
    find("tip").classList.add("hidden");
    this.root.querySelector(".at")?.classList.remove("at");
  }

  walk(event) {
    const tokens = this.root.querySelectorAll(".token");
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined || !tokens.length) return;
    event.preventDefault();
    this.hide();
    this.at = Math.max(0, Math.min(tokens.length - 1, to));
    const span = tokens[this.at];
    span.classList.add("at");
    span.scrollIntoView({ block: "nearest" });
    this.show(span);
    find("token-note").textContent = span.odds.map(([text, logprob]) => `${JSON.stringify(text)} ${(Math.exp(logprob) * 100).toFixed(1)} %`).join(", ");
  }
}
