// The playground: a client of /v1/chat/completions that shows answers token by token. It uses only public endpoints.

import { ask, element, events, find, isLocked, keyDialog, theme, url } from "./common.js";
import { Answer } from "./answer.js";
import { asCurl, asPython, copy } from "./code.js";
import { facts, waterfall } from "./waterfall.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const SCHEMA = JSON.stringify(
  { type: "object", properties: { city: { type: "string" }, country: { type: "string" } }, required: ["city", "country"], additionalProperties: false }, null, 2);
const TOOLS = JSON.stringify(
  [{ type: "function", function: { name: "weather", description: "The weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
const messages = []; // the conversation, in the API's format
let needsKey = false; // whether copied code must send an API key
let model = "";
let running = null; // AbortController of the running request
let answer = null; // the last answer on the screen
let sent = null; // the last request as it was sent
const showKey = keyDialog(load);

async function load() {
  try {
    model = (await (await ask("/v1/models")).json()).data[0].id;
    find("model").textContent = model;
    needsKey = await isLocked();
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
  if (isResumed && answer.isSaid) {
    messages.pop();
    answer.isSaid = false;
  }
  try {
    request = body(isResumed ? [...messages, { role: "assistant", content: answer.text }] : messages, isResumed);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    status(error.message);
    return;
  }
  sent = request;
  if (!isResumed) find("talk").append((answer = new Answer(find("tip"), find("token-note"))).card);
  answer.started = 0;
  follow(true);
  running = new AbortController();
  buttons();
  status("waiting for the first token");
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
      follow();
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
    follow();
    mine.done(() => showJourney(id));
    if (id) showJourney(id);
  }
}

function end(mine) {
  mine.isStopped = false;
  mine.isSaid = true;
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
  const isCut = answer && (answer.isStopped || answer.reason === "length");
  const isText = find("format").value === "text";
  find("resume").disabled = running !== null || !isCut || !answer.text || answer.calls.length > 0 || !isText;
  find("resume").title = isText ? "Continue an answer that was stopped or reached max tokens" : "A JSON answer cannot be continued: its grammar would start again";
}

// Keep the end of the conversation in view, unless the user has scrolled away from it.
function follow(isSure = false) {
  const talk = find("talk");
  if (isSure || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80) talk.scrollTop = talk.scrollHeight;
}

let shown = "";
async function showJourney(id) {
  // A journey is complete once the last byte is sent and the engine has reported its part.
  shown = id;
  for (let turn = 0; turn < 80 && shown === id; turn++) {
    try {
      const journey = await (await ask(`/v1/requests/${encodeURIComponent(id)}`)).json();
      if (shown !== id) return;
      find("journey").replaceChildren(facts(journey), waterfall(journey), ...(journey.note ? [element("p", { class: "faint", text: journey.note })] : []));
      if (!["waiting", "running"].includes(journey.state)) return;
    } catch (error) {
      find("journey").replaceChildren(element("span", { class: "faint", text: error.message }));
    }
    await new Promise((resume) => setTimeout(resume, 150));
  }
}

// ── the request as code, to copy ──
function showCode() {
  let request;
  try {
    const draft = find("prompt").value.trim();
    request = !draft && sent ? sent : body(draft ? [...messages, { role: "user", content: draft }] : messages);
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    find("code").textContent = error.message;
    return;
  }
  const base = new URL(url("/v1"), location.href).href;
  const write = find("language").value === "curl" ? asCurl : asPython;
  find("code").textContent = write(base, request, needsKey);
}

// ── user input ──
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running) return;
  if (answer?.isStopped && answer.text && !answer.isSaid) {
    messages.push(answer.message()); // the text up to the stop stays in the conversation
    answer.isSaid = true;
  }
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
  answer = sent = null;
  find("talk").replaceChildren();
  find("journey").replaceChildren(element("span", { class: "faint", text: "Where the time of the last answer went." }));
  buttons();
  showCode();
});
find("format").addEventListener("change", () => {
  const wantsSchema = find("format").value === "json_schema";
  find("schema-label").classList.toggle("hidden", !wantsSchema);
  if (wantsSchema && !find("schema").value.trim()) find("schema").value = SCHEMA;
  buttons();
});
find("tools-example").addEventListener("click", () => {
  find("tools").value = TOOLS;
  showCode();
});
find("copy").addEventListener("click", async () => {
  await copy(find("code").textContent, find("code"));
  find("copy").textContent = "Copied";
  setTimeout(() => (find("copy").textContent = "Copy"), 1200);
});
for (const id of ["controls", "ask", "language"]) {
  find(id).addEventListener("input", () => {
    if (id === "controls") sent = null; // show the request with the new settings
    showCode();
  });
}
find("controls").addEventListener("submit", (event) => event.preventDefault());
theme(find("theme"));
load();
