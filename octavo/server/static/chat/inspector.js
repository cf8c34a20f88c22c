// Behind one click: where an answer's time went, and its request as code to run elsewhere.

import { ask, copyButton, element, find, url } from "../shared/common.js";
import { asCurl, asPython } from "../shared/code.js";
import { facts, waterfall } from "../shared/waterfall.js";
import { statsOf } from "./messages.js";

const LOOKS = 80, LOOK_MS = 150; // a journey is complete once the last byte is sent and the engine has reported its part

export class Inspector {
  constructor() {
    this.shown = "";
    this.request = null;
    this.needsKey = false; // whether copied code must send an API key
    find("language").addEventListener("change", () => this.showCode());
    find("code-bar").append(copyButton("Copy the request", () => find("code").textContent, { id: "copy" }));
    this.clear();
  }

  clear() {
    this.shown = "";
    find("journey").replaceChildren(element("p", { class: "faint", text: "The times of an answer appear here: how long it waited, how long its prompt took, how long each token." }));
    find("answer-stats").textContent = "";
  }

  show(node) {
    find("answer-stats").textContent = statsOf(node);
    if (node.requestId) this.follow(node.requestId);
    else this.clear();
  }

  async follow(id) {
    this.shown = id;
    for (let look = 0; look < LOOKS && this.shown === id; look++) {
      try {
        const journey = await (await ask(`/v1/requests/${encodeURIComponent(id)}`)).json();
        if (this.shown !== id) return;
        find("journey").replaceChildren(facts(journey), waterfall(journey), ...(journey.note ? [element("p", { class: "faint", text: journey.note })] : []));
        if (!["waiting", "running"].includes(journey.state)) return;
      } catch (error) {
        if (this.shown !== id) return;
        const isGone = error.status === 404;
        find("journey").replaceChildren(element("p", { class: "faint", text: isGone ? "The server no longer has this answer's journey: it keeps the latest ones (--journey-bytes)." : error.message }));
        if (isGone && look > 5) return;
      }
      await new Promise((resume) => setTimeout(resume, LOOK_MS));
    }
  }

  setRequest(request, problem = "") {
    Object.assign(this, { request, problem });
    this.showCode();
  }

  showCode() {
    if (this.problem || !this.request) {
      find("code").textContent = this.problem || "";
      return;
    }
    const base = new URL(url("/v1"), location.href).href;
    find("code").textContent = (find("language").value === "curl" ? asCurl : asPython)(base, this.request, this.needsKey);
  }
}
