// The chat: a client of /v1/chat/completions. It uses only public endpoints; conversations stay in this browser.

import { ask, count, element, fillIcons, find, isLocked, keyDialog, many, theme } from "../shared/common.js";
import { Answer } from "./answer.js";
import { Attachments } from "./attachments.js";
import { Inspector } from "./inspector.js";
import { TalkView } from "./messages.js";
import { Mistake, Settings, requestOf } from "./settings.js";
import { installShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";
import { ROOT, addNode, choose, messageOf, newTalk, pathOf, pathTo, removeNode, touch } from "./tree.js";
import { isNarrow, openPanel, showSidebar, wirePanels } from "./panels.js";

const SAVE_MS = 700; // a streaming answer is stored this often
const NEAR_END = 90; // pixels: nearer to the end than this, the page follows the answer
const STARTERS = ["Explain how a mechanical watch keeps time", "Write a Python function that checks whether a text is a palindrome", "Compare tea and coffee in a table", "Give me three ideas for a rainy Sunday"];

let store, sidebar;
let talk = newTalk(Settings.last());
let models = [];
let running = null; // {talk, node, stream} of the answer that is being made
let isFollowing = true, lastTop = 0;
let lastRequest = null;

const showKey = keyDialog(() => loadModels());
const status = (text) => (find("status").textContent = text);
const card = () => models.find((model) => model.id === find("model").value) ?? models[0];

// ── the server ──
async function loadModels() {
  try {
    models = (await (await ask("/v1/models")).json()).data;
    const chosen = talk.model ?? find("model").value;
    find("model").replaceChildren(...models.map((model) => element("option", { value: model.id, text: model.id })));
    if (models.some((model) => model.id === chosen)) find("model").value = chosen;
    find("model").disabled = models.length < 2;
    find("model").dataset.loaded = "yes";
    inspector.needsKey = await isLocked();
    showModel();
    if (!running) status("ready");
  } catch (error) {
    status(error.message);
    if (error.status === 401) showKey();
    else setTimeout(loadModels, 2000);
  }
}

function showModel() {
  const model = card();
  if (!model) return;
  settings.showDefaults(model.default_sampling, model.max_model_len);
  const canChat = !model.capabilities?.length || model.capabilities.includes("chat");
  find("welcome-note").textContent = canChat
    ? `${model.id} answers on this server, with a context of ${count(model.max_model_len)} tokens. Conversations stay in this browser.`
    : `${model.id} has no chat template: it continues texts, and cannot hold a conversation. Use POST /v1/completions, or start the server with --chat-template FILE.`;
  showMeter();
  showCode();
}

// ── what is on the page ──
const view = new TalkView(find("messages"), {
  isRunning: (node) => running?.node === node,
  isBusy: () => running !== null,
  grown: () => follow(),
  canContinue: (node) => Boolean(node.text) && !node.calls?.length && !talk.settings.format && (node.reason === "length" || node.isCut),
  choose: (node) => {
    choose(talk, node);
    save();
    show();
  },
  regenerate: (node) => answer(node.parent),
  resume: (node) => answer(node.parent, { continued: node }),
  inspect: (node) => {
    inspector.show(node);
    openPanel("inspect");
  },
  edit: (node, text) => {
    const question = addNode(talk, node.parent, { role: "user", text, ...(node.files ? { files: node.files } : {}) });
    answer(question.id, { undo: (error) => {
      removeNode(talk, question.id);
      choose(talk, node);
      show();
      view.get(node.id)?.edit(text);
      showProblem(error);
    } });
  },
  sendResults: (node, results) => {
    if (running) return;
    let parent = node.id;
    node.calls.forEach((call, place) => (parent = addNode(talk, parent, { role: "tool", callId: call.id, text: results[place] }).id));
    answer(parent);
  },
});

function show() {
  const path = pathOf(talk);
  view.show(talk, path);
  find("welcome").classList.toggle("hidden", path.length > 0);
  document.body.classList.toggle("is-empty", !path.length);
  document.title = talk.title ? `${talk.title} · Octavo` : "Octavo chat";
  find("send").classList.toggle("hidden", running !== null);
  find("stop-button").classList.toggle("hidden", running === null);
  sidebar?.mark(talk.id);
  showMeter();
  showCode();
}

function showMeter() {
  const last = pathOf(talk).findLast((node) => node.usage), limit = card()?.max_model_len;
  const used = last ? last.usage.in + last.usage.out : 0;
  find("meter").textContent = used && limit ? `${count(used)} of ${count(limit)} tokens` : "";
  find("meter").classList.toggle("warn", used > 0.85 * limit);
}

// Keep the end in view, unless the user has scrolled away from it.
function follow(isSure = false) {
  const scroller = find("scroller");
  if (isSure) isFollowing = true;
  if (isFollowing) scroller.scrollTop = scroller.scrollHeight;
  showEnd();
}

function showEnd() {
  const scroller = find("scroller");
  find("to-end").classList.toggle("hidden", scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2 * NEAR_END);
}

function showProblem(error, again = null) {
  find("problem").classList.toggle("hidden", !error);
  find("problem-text").textContent = error ? sentence(error.message ?? String(error)) : "";
  find("problem-again").classList.toggle("hidden", !again);
  find("problem-again").onclick = again;
}

const sentence = (text) => `${text[0]?.toUpperCase() ?? ""}${text.slice(1)}`;

let noticeTimer = 0;
function notice(text, undo = null) {
  const hide = () => find("notice").classList.add("hidden");
  find("notice").replaceChildren(element("span", { text }), ...(undo ? [element("button", { type: "button", class: "text-button", text: "Undo", onclick: () => { hide(); undo(); } })] : []));
  find("notice").classList.remove("hidden");
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(hide, undo ? 8000 : 5000);
}

// ── keeping ──
async function save(which = talk) {
  // An empty chat is not worth keeping: it may have been stored while its first question, which failed, was on its way.
  const isKept = Object.keys(which.nodes).length > 0 || which.isNamed;
  try {
    if (isKept) await store.put(which);
    else await store.remove(which.id);
    await sidebar.show();
  } catch (error) {
    notice(`This conversation could not be stored: ${error?.name === "QuotaExceededError" ? "the browser has no room left" : sentence(error?.message ?? "the browser refused")}. Export what you want to keep.`);
  }
}

async function open(id) {
  const found = running?.talk.id === id ? running.talk : await store.get(id);
  if (!found) return;
  talk = found;
  location.hash = id;
  settings.show(talk.settings);
  if (talk.model && models.some((model) => model.id === talk.model)) find("model").value = talk.model;
  inspector.clear();
  lastRequest = null;
  showProblem(null);
  show();
  follow(true);
  if (isNarrow()) showSidebar(false);
  else find("prompt").focus();
  takeUp();
}

function fresh() {
  talk = newTalk(Settings.last());
  history.replaceState(null, "", location.pathname + location.search);
  settings.show(talk.settings);
  inspector.clear();
  lastRequest = null;
  showProblem(null);
  show();
  if (isNarrow()) showSidebar(false);
  find("prompt").focus();
}

// An answer that was streaming when the page was closed or reloaded.
function takeUp() {
  const last = pathOf(talk).at(-1);
  if (running || last?.role !== "assistant" || !last.stream) return;
  answer(last.parent, { continued: last, saved: last.stream });
}

// ── asking ──
function send() {
  const text = find("prompt").value.trim();
  if (running) return;
  if (!text && !attachments.files.length) return find("prompt").focus();
  const files = attachments.take(), parent = pathOf(talk).at(-1)?.id ?? ROOT;
  find("prompt").value = "";
  fit();
  const mine = talk;
  const question = addNode(talk, parent, { role: "user", text, ...(files.length ? { files } : {}) });
  // What could not be sent goes back into the field, and the conversation is as it was.
  const undo = (error) => {
    removeNode(mine, question.id);
    if (talk === mine) {
      find("prompt").value = [text, find("prompt").value].filter(Boolean).join("\n\n");
      attachments.put(files);
      fit();
      show();
      find("prompt").focus();
    }
    showProblem(error, error instanceof Mistake ? null : () => { showProblem(null); send(); });
  };
  answer(question.id, { undo });
}

// Make an answer to the message `parent`. `continued`: the answer that goes on; `saved`: the stream it came from.
async function answer(parent, { undo = null, continued = null, saved = null } = {}) {
  if (running) return;
  const mine = talk, node = continued ?? addNode(mine, parent, { role: "assistant" });
  const before = continued ? { reason: node.reason, isCut: node.isCut, note: node.note } : null;
  const drop = () => {
    if (continued) Object.assign(node, before);
    else removeNode(mine, node.id);
  };
  let request = null;
  try {
    if (!saved) request = requestOf(find("model").value, mine.settings, [...pathTo(mine, parent), ...(continued ? [node] : [])].map(messageOf), continued !== null);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    drop();
    if (undo) undo(error);
    else showProblem(error);
    show();
    return;
  }
  const stream = new Stream(request, saved), made = new Answer(node);
  running = { talk: mine, node, stream };
  Object.assign(node, { reason: "", isCut: false, note: "" });
  mine.model = find("model").value;
  if (request) lastRequest = request;
  showProblem(null);
  show();
  follow(!saved || isFollowing);
  status(saved ? "reading on" : "waiting for the first token");
  if (location.hash.slice(1) !== mine.id && talk === mine) history.replaceState(null, "", `#${mine.id}`);
  let failure = null, saving = 0, hasSaved = false;
  // With what has come, the stream's id and place are stored: a page that is loaded again reads on from there.
  const keepUp = () => {
    saving ||= setTimeout(() => {
      saving = 0;
      node.stream = stream.saved;
      store.put(mine).catch(() => {}); // save() at the end says what is wrong
    }, hasSaved ? SAVE_MS : 0);
    hasSaved = true;
  };
  await save(mine);
  try {
    for await (const chunk of stream.chunks((isLost) => status(isLost ? "connection lost, reconnecting" : "reconnected"))) {
      if (chunk.queue) {
        status(queueText(chunk.queue));
        continue;
      }
      made.take(chunk);
      node.requestId = stream.requestId || node.requestId;
      if (made.hasBegun) status("answering");
      view.get(node.id)?.grow();
      keepUp();
    }
  } catch (error) {
    failure = error;
  }
  clearTimeout(saving);
  delete node.stream;
  running = null;
  made.end();
  conclude(mine, node, made, stream, failure, { drop, undo, saved });
}

function conclude(mine, node, made, stream, failure, { drop, undo, saved }) {
  const hasText = Boolean(node.text || node.thought || node.calls?.length);
  if (stream.isStopped) {
    status("stopped");
    if (hasText) Object.assign(node, { isCut: true });
    else {
      drop();
      undo?.(new Error("stopped before the first token"));
      showProblem(null);
    }
  } else if (failure) {
    status("failed");
    if (failure.status === 401) showKey();
    if (made.hasBegun || saved) {
      const why = saved && failure.status === 404 ? "the page was reloaded, and the server no longer has the rest" : failure.message;
      Object.assign(node, { isCut: true, note: `The answer is not complete: ${why}.` });
    } else {
      drop();
      if (undo) undo(failure);
      else showProblem(failure);
    }
  } else {
    status([`finished (${node.reason})`, node.usage ? `${count(node.usage.in)} → ${many(node.usage.out, "token")}` : "", node.times?.rate ? `${count(node.times.rate)} tokens/s` : ""].filter(Boolean).join(", "));
    find("spoken").textContent = node.text.slice(0, 2000); // the answer is read out once, when it is complete
  }
  touch(mine);
  save(mine);
  if (talk !== mine) return;
  show();
  view.get(node.id)?.grow();
  if (node.requestId && mine.nodes[node.id]) inspector.show(node);
}

function queueText(comment) {
  const [, position, estimate] = /position=(\d+)(?: estimate_s=([\d.]+))?/.exec(comment) ?? [];
  return position ? `waiting: ${count(Number(position))} in the queue before it is computed${estimate ? `, about ${Math.ceil(Number(estimate))} s` : ""}` : "waiting";
}

// ── the request as code ──
function showCode() {
  const draft = find("prompt").value.trim(), path = pathOf(talk);
  if (!draft && lastRequest) return inspector.setRequest(lastRequest);
  try {
    inspector.setRequest(requestOf(find("model").value, talk.settings, [...path.map(messageOf), ...(draft || !path.length ? [{ role: "user", content: draft || "Hello" }] : [])]));
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    inspector.setRequest(null, error.message);
  }
}

// ── wiring ──
function fit() {
  const field = find("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, Math.max(120, innerHeight * 0.4))}px`;
}

fillIcons();
theme(find("theme"));
const inspector = new Inspector();
const settings = new Settings((values) => {
  talk.settings = values;
  lastRequest = null; // show the request with the new settings
  touch(talk);
  save();
  show();
});
const attachments = new Attachments((problem) => showProblem(new Error(problem)), () => showCode());
settings.show(talk.settings);
wirePanels(() => {
  const last = pathOf(talk).findLast((node) => node.role === "assistant");
  if (last && find("journey").querySelector(".facts") === null) inspector.show(last);
});
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("prompt").addEventListener("input", () => {
  fit();
  showCode();
});
find("prompt").addEventListener("keydown", (event) => {
  const isPhone = matchMedia("(pointer: coarse)").matches; // there Enter is a new line: no Shift is at hand
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isPhone) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !find("prompt").value && !running) {
    const last = pathOf(talk).findLast((node) => node.role === "user");
    if (last) {
      event.preventDefault();
      view.get(last.id)?.edit();
    }
  }
});
find("stop-button").addEventListener("click", () => running?.stream.stop());
find("problem-close").addEventListener("click", () => showProblem(null));
find("model").addEventListener("change", () => {
  talk.model = find("model").value;
  lastRequest = null;
  showModel();
  save();
});
find("scroller").addEventListener("scroll", () => {
  const scroller = find("scroller");
  const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
  if (isNear || scroller.scrollTop < lastTop) isFollowing = isNear; // a text that grows is no reason to stop: only scrolling up is
  lastTop = scroller.scrollTop;
  showEnd();
});
new ResizeObserver(() => follow()).observe(find("messages"));
find("to-end").addEventListener("click", () => follow(true));
find("starters").append(...STARTERS.map((text) => element("button", { type: "button", text, onclick: () => {
  find("prompt").value = text;
  fit();
  find("prompt").focus();
  showCode();
} })));
installShortcuts({
  fresh,
  inspect: () => {
    const last = pathOf(talk).findLast((node) => node.role === "assistant");
    if (last) inspector.show(last);
    openPanel("inspect");
  },
  stop: () => {
    if (!running) return false;
    running.stream.stop();
    return true;
  },
});
addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id && id !== talk.id) open(id);
});

store = await Store.open();
sidebar = new Sidebar(store, {
  open,
  fresh,
  notice,
  removed: (id) => {
    if (running?.talk.id === id) running.stream.stop();
    if (talk.id === id) fresh();
  },
  renamed: async (id, title) => {
    const renamed = id === talk.id ? talk : running?.talk.id === id ? running.talk : await store.get(id);
    Object.assign(renamed, { title, isNamed: true });
    await store.put(renamed);
    if (id === talk.id) show();
  },
});
store.onOthers(async (id) => {
  await sidebar.show();
  if (id !== talk.id || running?.talk.id === id) return;
  const changed = await store.get(id);
  if (!changed || changed.updated === talk.updated || pathOf(changed).some((node) => node.stream)) return; // that tab is still reading an answer
  talk = changed;
  show();
});
if (!store.isKept) notice("This browser keeps no data for this page: conversations are lost when it is closed.");
show();
await sidebar.show();
await loadModels();
if (location.hash.length > 1) await open(location.hash.slice(1));
if (!matchMedia("(pointer: coarse)").matches) find("prompt").focus();
document.body.dataset.ready = "yes";
