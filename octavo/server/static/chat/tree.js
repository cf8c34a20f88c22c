// A talk: a tree of messages. A question that was edited and an answer that was made again are siblings; `chosen` says which of them
// is shown. Plain objects, so that a talk can be stored, exported and read back.

export const ROOT = "root";
const TITLE_LENGTH = 60;

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

export function newTalk(settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", isNamed: false, created: now, updated: now, settings: { ...settings }, nodes: {}, chosen: {} };
}

export function addNode(talk, parent, node) {
  const made = { id: newId(), parent, text: "", at: Date.now(), ...node };
  talk.nodes[made.id] = made;
  talk.chosen[parent] = made.id;
  touch(talk);
  return made;
}

// Remove a message and all that follows it. The sibling before it is shown instead.
export function removeNode(talk, id) {
  const node = talk.nodes[id];
  if (!node) return;
  for (const child of children(talk, id)) removeNode(talk, child.id);
  delete talk.nodes[id];
  delete talk.chosen[id];
  const rest = children(talk, node.parent);
  if (talk.chosen[node.parent] === id) {
    if (rest.length) talk.chosen[node.parent] = rest.at(-1).id;
    else delete talk.chosen[node.parent];
  }
  touch(talk);
}

export const children = (talk, id) => Object.values(talk.nodes).filter((node) => node.parent === id).sort((a, b) => a.at - b.at);

// The messages that are shown, from the first to the last.
export function pathOf(talk) {
  const found = [];
  for (let id = talk.chosen[ROOT]; id !== undefined && talk.nodes[id]; id = talk.chosen[id]) found.push(talk.nodes[id]);
  return found;
}

// Messages up to a node, itself included.
export function pathTo(talk, id) {
  const found = [];
  for (let node = talk.nodes[id]; node; node = talk.nodes[node.parent]) found.unshift(node);
  return found;
}

export function choose(talk, node) {
  talk.chosen[node.parent] = node.id;
  touch(talk);
}

export function touch(talk) {
  talk.updated = Date.now();
  if (!talk.isNamed) talk.title = titleOf(talk);
}

function titleOf(talk) {
  const first = pathOf(talk).find((node) => node.role === "user");
  const line = (first?.text.trim() || first?.files?.[0]?.name || "").split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

// ── the API's messages ──
const fenceFor = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) || []).map((run) => run.length + 1)));

// A question with its files: each in a fence that nothing inside it can close.
export function contentOf({ text, files = [] }) {
  const parts = files.map((file) => {
    const fence = fenceFor(file.text);
    return `File ${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

export function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
  if (node.role === "user") return { role: "user", content: contentOf(node) };
  const message = { role: "assistant", content: node.text || null };
  if (node.calls?.length) message.tool_calls = node.calls;
  return message;
}

// ── reading what was written elsewhere ──
const ROLES = new Set(["user", "assistant", "tool"]);
const MAX_NODES = 10_000;

// A talk from a file, checked field by field; throws an Error that says what is wrong.
export function readTalk(given) {
  const fail = (why) => {
    throw new Error(why);
  };
  if (!given || typeof given !== "object" || typeof given.nodes !== "object" || !given.nodes) fail("a conversation has no messages");
  const entries = Object.entries(given.nodes);
  if (entries.length > MAX_NODES) fail(`a conversation has ${entries.length} messages; at most ${MAX_NODES} are read`);
  const talk = newTalk();
  const ids = new Map(entries.map(([id]) => [id, newId()]));
  const text = (value) => (typeof value === "string" ? value : "");
  for (const [id, node] of entries) {
    if (!node || !ROLES.has(node.role)) fail(`a message has the role ${JSON.stringify(node?.role)}; it must be user, assistant or tool`);
    const parent = node.parent === ROOT ? ROOT : ids.get(node.parent);
    if (!parent) fail("a message follows one that is not in the file");
    const files = Array.isArray(node.files) ? node.files.filter((file) => typeof file?.name === "string" && typeof file?.text === "string").map(({ name, text }) => ({ name, text })) : [];
    const calls = Array.isArray(node.calls) ? node.calls.filter((call) => typeof call?.function?.name === "string").map((call) => ({ id: text(call.id), type: "function", function: { name: call.function.name, arguments: text(call.function.arguments) } })) : [];
    talk.nodes[ids.get(id)] = {
      id: ids.get(id), parent, role: node.role, text: text(node.text), at: Number(node.at) || 0, thought: text(node.thought), reason: text(node.reason), model: text(node.model),
      ...(files.length ? { files } : {}), ...(calls.length ? { calls } : {}), ...(node.callId ? { callId: text(node.callId) } : {}),
    };
  }
  const followers = new Map();
  for (const node of Object.values(talk.nodes).sort((a, b) => a.at - b.at)) followers.set(node.parent, [...(followers.get(node.parent) || []), node]);
  const reached = [...(followers.get(ROOT) || [])];
  for (let at = 0; at < reached.length; at++) reached.push(...(followers.get(reached[at].id) || []));
  if (reached.length !== entries.length) fail("messages follow each other in a circle");
  for (const [from, to] of Object.entries(given.chosen || {})) {
    const parent = from === ROOT ? ROOT : ids.get(from);
    if (parent && ids.has(to) && talk.nodes[ids.get(to)].parent === parent) talk.chosen[parent] = ids.get(to);
  }
  for (const [parent, nodes] of followers) talk.chosen[parent] ??= nodes.at(-1).id;
  talk.settings = readSettings(given.settings);
  if (typeof given.title === "string" && given.title.trim()) Object.assign(talk, { title: given.title.trim().slice(0, 200), isNamed: Boolean(given.isNamed) });
  else touch(talk);
  for (const name of ["created", "updated"]) if (Number.isFinite(given[name])) talk[name] = given[name];
  return talk;
}

const readSettings = (given) => Object.fromEntries(Object.entries(given && typeof given === "object" ? given : {}).filter(([name, value]) => name.length < 40 && typeof value === "string"));

export function asMarkdown(talk) {
  const names = { user: "You", assistant: "Assistant", tool: "Tool" };
  const parts = pathOf(talk).map((node) => `## ${names[node.role]}\n\n${node.role === "user" ? contentOf(node) : node.text}\n`);
  return [`# ${talk.title || "Chat"}\n`, ...(talk.settings.system ? [`> ${talk.settings.system.replaceAll("\n", "\n> ")}\n`] : []), ...parts].join("\n");
}
