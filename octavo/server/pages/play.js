// The playground: talks to /v1/chat/completions as any client does, and shows what came, token by token.
// Knows nothing of the server beyond its public endpoints.

import { ask, element, events, find, key, keyDialog, theme, url } from "./common.js";
import { Answer } from "./answer.js";
import { facts, waterfall } from "./waterfall.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const messages = []; // what was said, as the API takes it
let model = "";
let running = null; // the request that is under way
let answer = null; // the one on the screen that is written, or was stopped
const showKey = keyDialog(load);

async function load() {
  try {
    model = (await (await ask("/v1/models")).json()).data[0].id;
    find("model").textContent = model;
    status("ready");
  } catch (error) {
    status(error.message);
    if (error.status === 401) showKey();
  }
  showCode();
}

const status = (text) => (find("status").textContent = text);

// ── the request, from the controls ──
class Mistake extends Error {}

function readJson(id, what) {
  const text = find(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Mistake(`${what} is not JSON: ${error.message}`);
  }
}

function body(said, isResumed = false) {
  const request = { model, messages: [], stream: true, stream_options: { include_usage: true } };
  const system = find("system").value.trim();
  if (system) request.messages.push({ role: "system", content: system });
  request.messages.push(...said);
  for (const name of NUMBERS) if (find(name).value !== "") request[name] = Number(find(name).value);
  const stops = find("stop").value.split("\n").filter(Boolean);
  if (stops.length) request.stop = stops;
  const format = find("format").value;
  if (format === "json_object") request.response_format = { type: "json_object" };
  if (format === "json_schema") {
    const schema = readJson("schema", "the schema");
    if (!schema) throw new Mistake("the JSON schema is missing");
    request.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  const tools = readJson("tools", "the list of tools");
  if (tools) Object.assign(request, { tools, tool_choice: find("tool_choice").value });
  const alternatives = find("logprobs").value;
  if (alternatives) Object.assign(request, { logprobs: true, top_logprobs: Number(alternatives) });
  if (isResumed) Object.assign(request, { add_generation_prompt: false, continue_final_message: true });
  return request;
}

// ── sending and streaming ──
async function send(isResumed = false) {
  let request;
  try {
    request = body(isResumed ? [...messages, { role: "assistant", content: answer.text }] : messages, isResumed);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    status(error.message);
    return;
  }
  if (!isResumed) find("talk").append((answer = new Answer(find("tip"))).card);
  running = new AbortController();
  buttons();
  status("asking");
  const mine = answer;
  let id = "";
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
      signal: running.signal,
    });
    id = response.headers.get("x-request-id");
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      mine.take(chunk);
      if (mine.started) status("streaming");
    }
    status(mine.summary());
    end(mine);
  } catch (error) {
    const isStopped = running.signal.aborted;
    mine.isStopped = isStopped;
    status(isStopped ? "stopped" : error.message);
    if (!isStopped) mine.fail(error.message);
    if (error.status === 401) showKey();
  } finally {
    running = null;
    buttons();
    showCode();
    if (id) showJourney(id);
  }
}

function end(mine) {
  mine.isStopped = false;
  messages.push(mine.message());
  if (mine.calls.length) mine.askResults((results) => {
    messages.push(...results);
    for (const result of results) say("tool", result.content);
    send();
  });
}

function say(role, text) {
  find("talk").append(
    element("article", { class: `message ${role}` }, element("div", { class: "who", text: role }), element("div", { class: "text", text })),
  );
}

function buttons() {
  find("send").disabled = running !== null;
  find("stop-button").disabled = running === null;
  find("resume").disabled = running !== null || !answer?.isStopped || !answer.text || answer.calls.length > 0;
}

async function showJourney(id) {
  // A journey is told when the last byte is out and the engine has said its part.
  for (let turn = 0; turn < 80; turn++) {
    try {
      const journey = await (await ask(`/v1/requests/${encodeURIComponent(id)}`)).json();
      find("journey").replaceChildren(facts(journey), waterfall(journey));
      if (!["waiting", "running"].includes(journey.state)) return;
    } catch (error) {
      find("journey").replaceChildren(element("span", { class: "faint", text: error.message }));
    }
    await new Promise((resume) => setTimeout(resume, 150));
  }
}

// ── the same request, to copy ──
function showCode() {
  let request;
  try {
    const draft = find("prompt").value.trim();
    request = body(draft ? [...messages, { role: "user", content: draft }] : messages);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    find("code").textContent = error.message;
    return;
  }
  const base = new URL(url("/v1"), location.href).href;
  find("code").textContent = find("language").value === "curl" ? asCurl(base, request) : asPython(base, request);
}

function asCurl(base, request) {
  const quoted = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const secret = key() ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  return `curl -N ${base}/chat/completions \\\n  -H "Content-Type: application/json"${secret} \\\n  -d '${quoted}'`;
}

function asPython(base, request) {
  const own = ["top_k", "min_p"]; // fields that OpenAI's client does not know
  const extra = Object.fromEntries(own.filter((name) => name in request).map((name) => [name, request[name]]));
  const plain = Object.fromEntries(Object.entries(request).filter(([name]) => !own.includes(name)));
  const lines = Object.entries(plain).map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra, 1)},`);
  const secret = key() ? 'os.environ["OCTAVO_API_KEY"]' : '"none"';
  return [
    key() ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}", api_key=${secret})`,
    "for chunk in client.chat.completions.create(",
    ...lines,
    "):",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
  ].join("\n");
}

function pythonValue(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList ? value.map((item) => pythonValue(item, depth + 1)) : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonValue(item, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (items.join(", ").length < 70) return `${open}${items.join(", ")}${close}`;
  const pad = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${pad}${item},`).join("\n")}\n${"    ".repeat(depth)}${close}`;
}

// ── what people do ──
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running) return;
  if (answer?.isStopped && answer.text) messages.push(answer.message()); // what was said until it was stopped, stays said
  messages.push({ role: "user", content: text });
  say("user", text);
  find("prompt").value = "";
  send();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
find("stop-button").addEventListener("click", () => running?.abort());
find("resume").addEventListener("click", () => send(true));
find("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  answer = null;
  find("talk").replaceChildren();
  find("journey").replaceChildren(element("span", { class: "faint", text: "Where the time of the last answer went." }));
  buttons();
  showCode();
});
find("format").addEventListener("change", () => find("schema-label").classList.toggle("hidden", find("format").value !== "json_schema"));
find("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(find("code").textContent);
  find("copy").textContent = "Copied";
  setTimeout(() => (find("copy").textContent = "Copy"), 1200);
});
for (const id of ["controls", "ask", "language"]) find(id).addEventListener("input", showCode);
find("controls").addEventListener("submit", (event) => event.preventDefault());
theme(find("theme"));
load();
