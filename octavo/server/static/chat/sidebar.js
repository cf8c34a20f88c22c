// The list of talks: new, search, rename, delete, export, import.

import { element, find, iconButton, saveFile } from "../shared/common.js";
import { asMarkdown, readTalk } from "./tree.js";

const FORMAT = "octavo-chats";
const MAX_IMPORT_BYTES = 64 * 2 ** 20, MAX_TALKS = 5000;
const DAY = 86_400_000;

export class Sidebar {
  // `actions`: open(id), fresh(), removed(id), imported(), renamed(id, title), notice(text, undo)
  constructor(store, actions) {
    Object.assign(this, { store, actions });
    this.current = "";
    this.turn = 0;
    find("new").addEventListener("click", () => actions.fresh());
    find("search").addEventListener("input", () => this.show());
    find("search").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && find("search").value) {
        event.stopPropagation();
        find("search").value = "";
        this.show();
      } else if (event.key === "ArrowDown" || event.key === "Enter") {
        event.preventDefault();
        find("talks").querySelector(".talk-open")?.[event.key === "Enter" ? "click" : "focus"]();
      }
    });
    find("talks").addEventListener("keydown", (event) => this.walk(event));
    find("export").addEventListener("click", () => this.exportAll());
    find("import").addEventListener("click", () => find("import-field").click());
    find("import-field").addEventListener("change", async () => {
      for (const file of find("import-field").files) await this.importFile(file);
      find("import-field").value = "";
    });
    document.addEventListener("click", (event) => {
      if (!event.target.closest(".talk-menu, .talk-more")) this.closeMenu();
    });
  }

  walk(event) {
    const items = [...find("talks").querySelectorAll(".talk-open")], at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (at >= 0 && to !== undefined) {
      event.preventDefault();
      (items[to] ?? (to < 0 ? find("search") : items.at(-1))).focus();
    } else if (at >= 0 && event.key === "Delete") {
      event.preventDefault();
      this.remove(items[at].dataset.id);
    } else if (at >= 0 && event.key === "F2") {
      event.preventDefault();
      this.rename(items[at].dataset.id);
    }
  }

  async show() {
    const turn = ++this.turn, words = find("search").value.trim();
    const heads = words ? await this.store.search(words) : await this.store.list();
    if (turn !== this.turn) return;
    const groups = new Map();
    for (const head of heads) {
      const name = words ? "Found" : ageOf(head.updated);
      groups.set(name, [...(groups.get(name) || []), head]);
    }
    const focused = document.activeElement?.dataset?.id;
    find("talks").replaceChildren(...[...groups].flatMap(([name, group]) => [element("h2", { text: name }), ...group.map((head) => this.item(head))]));
    find("no-talks").classList.toggle("hidden", heads.length > 0);
    find("no-talks").textContent = words ? "No conversation has these words." : "Your conversations appear here. They stay in this browser.";
    if (focused) find("talks").querySelector(`.talk-open[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  item(head) {
    const open = element("button", { type: "button", class: "talk-open", "data-id": head.id, "aria-current": String(head.id === this.current), onclick: () => this.actions.open(head.id) },
      element("span", { class: "talk-title", text: head.title || "New chat" }), ...(head.snippet ? [element("span", { class: "snippet", text: head.snippet })] : []));
    const more = iconButton("more", `More for ${head.title || "New chat"}`, () => this.openMenu(head, item), { "aria-haspopup": "menu" });
    more.classList.add("talk-more");
    const item = element("div", { class: "talk" }, open, more);
    return item;
  }

  openMenu(head, item) {
    const wasOpen = item.querySelector(".talk-menu");
    this.closeMenu();
    if (wasOpen) return;
    const entry = (text, onclick, kind = "") => element("button", { type: "button", role: "menuitem", class: kind, text, onclick: () => { this.closeMenu(); onclick(); } });
    const menu = element("div", { class: "talk-menu", role: "menu" },
      entry("Rename", () => this.rename(head.id)),
      entry("Export as Markdown", () => this.exportOne(head.id, "md")),
      entry("Export as JSON", () => this.exportOne(head.id, "json")),
      entry("Delete", () => this.remove(head.id), "bad"));
    menu.addEventListener("keydown", (event) => {
      const entries = [...menu.children], at = entries.indexOf(document.activeElement);
      if (event.key === "Escape") {
        event.stopPropagation();
        this.closeMenu();
        item.querySelector(".talk-more").focus();
      } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        entries[(at + (event.key === "ArrowDown" ? 1 : entries.length - 1)) % entries.length].focus();
      }
    });
    item.append(menu);
    menu.firstElementChild.focus();
  }

  closeMenu() {
    document.querySelector(".talk-menu")?.remove();
  }

  mark(id) {
    this.current = id;
    for (const button of find("talks").querySelectorAll(".talk-open")) button.setAttribute("aria-current", String(button.dataset.id === id));
  }

  async rename(id) {
    const button = find("talks").querySelector(`.talk-open[data-id="${CSS.escape(id)}"]`);
    const talk = await this.store.get(id);
    if (!button || !talk) return;
    const field = element("input", { class: "rename", "aria-label": "Name of the conversation", value: talk.title, maxlength: 200 });
    let isOver = false;
    const finish = async (isKept) => {
      if (isOver) return;
      isOver = true;
      const title = field.value.trim();
      if (isKept && title && title !== talk.title) await this.actions.renamed(id, title);
      await this.show();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
    });
    field.addEventListener("blur", () => finish(true));
    button.replaceWith(field);
    field.focus();
    field.select();
  }

  async remove(id) {
    const talk = await this.store.get(id);
    if (!talk) return;
    await this.store.remove(id);
    await this.actions.removed(id);
    await this.show();
    this.actions.notice(`“${talk.title || "New chat"}” was deleted.`, async () => {
      await this.store.put(talk);
      await this.show();
      this.actions.open(id);
    });
  }

  // ── files ──
  async exportOne(id, kind) {
    const talk = await this.store.get(id);
    const name = (talk.title || "chat").replace(/[^\p{L}\p{N} _-]+/gu, "").trim().replaceAll(" ", "-").slice(0, 60) || "chat";
    if (kind === "md") saveFile(`${name}.md`, asMarkdown(talk), "text/markdown");
    else saveFile(`${name}.json`, written([talk]));
  }

  async exportAll() {
    const talks = await this.store.all();
    if (!talks.length) return this.actions.notice("There is no conversation to export yet.");
    saveFile(`octavo-chats-${new Date().toISOString().slice(0, 10)}.json`, written(talks));
  }

  async importFile(file) {
    try {
      if (file.size > MAX_IMPORT_BYTES) throw new Error(`it has more than ${MAX_IMPORT_BYTES / 2 ** 20} MiB`);
      let given;
      try {
        given = JSON.parse(await file.text());
      } catch {
        throw new Error("it is not JSON");
      }
      if (given?.format !== FORMAT || !Array.isArray(given.conversations)) throw new Error("it was not exported by this page");
      if (given.conversations.length > MAX_TALKS) throw new Error(`it has more than ${MAX_TALKS} conversations`);
      const talks = given.conversations.map(readTalk); // all or none
      for (const talk of talks) await this.store.put(talk);
      await this.show();
      this.actions.notice(`${talks.length === 1 ? "1 conversation was" : `${talks.length} conversations were`} imported.`);
    } catch (error) {
      this.actions.notice(`${file.name} was not imported: ${error.message}.`);
    }
  }
}

const written = (conversations) => JSON.stringify({ format: FORMAT, version: 1, exported: new Date().toISOString(), conversations }, null, 1);

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last seven days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
