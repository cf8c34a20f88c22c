// Talks kept by this browser, in IndexedDB: `talks` has them whole, `heads` what the list shows. Nothing is sent to the server.
// Where the browser gives no database (some private windows), they live until the page is closed.

const NAME = "octavo", VERSION = 1;
const MAX_FOUND = 200;

const wait = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
const finish = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });

export class Store {
  static async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("talks", { keyPath: "id" });
        request.result.createObjectStore("heads", { keyPath: "id" });
      };
      const store = new Store(await wait(request));
      await store.list();
      return store;
    } catch {
      return new Store(null);
    }
  }

  constructor(base) {
    this.base = base;
    this.memory = new Map();
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel("octavo-talks") : null; // other tabs
  }

  get isKept() {
    return this.base !== null;
  }

  // `react` gets the id of a talk that another tab has changed.
  onOthers(react) {
    if (this.channel) this.channel.onmessage = (event) => react(event.data);
  }

  async put(talk) {
    if (!this.base) this.memory.set(talk.id, structuredClone(talk));
    else {
      const transaction = this.base.transaction(["talks", "heads"], "readwrite");
      transaction.objectStore("talks").put(talk);
      transaction.objectStore("heads").put(headOf(talk));
      await finish(transaction);
    }
    this.channel?.postMessage(talk.id);
  }

  async get(id) {
    if (!this.base) return structuredClone(this.memory.get(id));
    return wait(this.base.transaction("talks").objectStore("talks").get(id));
  }

  async remove(id) {
    this.memory.delete(id);
    if (this.base) {
      const transaction = this.base.transaction(["talks", "heads"], "readwrite");
      transaction.objectStore("talks").delete(id);
      transaction.objectStore("heads").delete(id);
      await finish(transaction);
    }
    this.channel?.postMessage(id);
  }

  // What the list shows, the latest first.
  async list() {
    const heads = this.base ? await wait(this.base.transaction("heads").objectStore("heads").getAll()) : [...this.memory.values()].map(headOf);
    return heads.sort((a, b) => b.updated - a.updated);
  }

  async all() {
    return this.base ? wait(this.base.transaction("talks").objectStore("talks").getAll()) : [...this.memory.values()].map((talk) => structuredClone(talk));
  }

  // Talks that have every word somewhere in their title or messages, each with the place that was found.
  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (const talk of (await this.all()).sort((a, b) => b.updated - a.updated)) {
      const texts = [talk.title, ...Object.values(talk.nodes).map((node) => node.text)];
      const whole = texts.join("\n").toLowerCase();
      if (!words.every((word) => whole.includes(word))) continue;
      found.push({ ...headOf(talk), snippet: snippetOf(texts.slice(1), words[0]) });
      if (found.length >= MAX_FOUND) break;
    }
    return found;
  }
}

const headOf = ({ id, title, updated }) => ({ id, title, updated });

function snippetOf(texts, word) {
  for (const text of texts) {
    const at = text.toLowerCase().indexOf(word);
    if (at >= 0) return `${at > 20 ? "…" : ""}${text.slice(Math.max(0, at - 20), at + 60).replaceAll("\n", " ")}…`;
  }
  return "";
}
