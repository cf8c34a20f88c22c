// The playground: one conversation with the served model, and beside each answer how it came about.
import { ask, element, events, waterfall } from "./shared.js";

const at = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
let model = "", messages = [], stream = null;

function body() {
  const system = at("system").value.trim();
  const asked = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, resumable: true },
    logprobs: true,
    top_logprobs: 5,
  };
  for (const name of NUMBERS) if (at(name).value !== "") asked[name] = Number(at(name).value);
  if (at("stops").value) asked.stop = at("stops").value;
  if (at("schema").value.trim()) {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(at("schema").value) } };
  }
  if (at("tools").value.trim()) asked.tools = JSON.parse(at("tools").value);
  return asked;
}

// ── one answer ──

class Answer {
  constructor() {
    this.text = "";
    this.next = 0; // number of the event that has not been read
    this.id = "";
    this.calls = [];
    this.box = turn("assistant");
    this.gate = new AbortController();
  }

  async read(response) {
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const { name, data } of events(response)) {
      if (name === "octavo.journey") showJourney(JSON.parse(data));
      else if (data === "[DONE]") return;
      else this.take(JSON.parse(data));
    }
  }

  take(chunk) {
    this.next += 1;
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id;
    for (const choice of chunk.choices ?? []) {
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning ?? delta.reasoning_content;
      if (reasoning) this.box.append(element("span", reasoning, { class: "reasoning" }));
      if (delta.content) this.write(delta.content, choice.logprobs?.content ?? []);
      for (const call of delta.tool_calls ?? []) this.call(call);
      if (choice.finish_reason) at("status").textContent = `ended: ${choice.finish_reason}`;
    }
    if (chunk.usage) at("status").textContent += `; ${chunk.usage.prompt_tokens} → ${chunk.usage.completion_tokens} tokens`;
  }

  write(text, logprobs) {
    this.text += text;
    const piece = element("span", text, { class: "token", tabindex: "0" });
    const tell = () => {
      const [first] = logprobs;
      if (!first) return;
      const others = first.top_logprobs.map((other) => `${JSON.stringify(other.token)} ${(Math.exp(other.logprob) * 100).toFixed(1)} %`);
      at("probability").textContent = `${JSON.stringify(first.token)} was ${(Math.exp(first.logprob) * 100).toFixed(1)} % likely; the likeliest: ${others.join(", ")}`;
    };
    piece.addEventListener("pointerenter", tell);
    piece.addEventListener("focus", tell);
    this.box.append(piece);
  }

  call(part) {
    const call = (this.calls[part.index] ??= { box: this.box.appendChild(element("pre")), name: "", text: "" });
    call.name += part.function?.name ?? "";
    call.text += part.function?.arguments ?? "";
    call.box.textContent = `${call.name}(${call.text})`;
  }
}

function turn(role) {
  const box = element("div", "", { class: "turn" });
  box.append(element("b", role));
  at("turns").append(box);
  return box;
}

async function run(response) {
  const answer = stream;
  setRunning(true);
  try {
    await answer.read(await response);
    messages.push({ role: "assistant", content: answer.text });
    stream = null;
    await showJourneyOf(answer.id);
  } catch (error) {
    if (answer.gate.signal.aborted) at("status").textContent = "stopped; the server goes on for a while, and Resume reads on";
    else {
      answer.box.append(element("p", error.message, { class: "error" }));
      stream = null;
    }
  }
  setRunning(false);
}

function setRunning(isRunning) {
  at("send").disabled = isRunning;
  at("stop").disabled = !isRunning;
  at("resume").disabled = isRunning || !stream?.id;
}

async function showJourneyOf(id) {
  const response = await ask(`v1/requests/${encodeURIComponent(id)}`);
  if (response.ok) showJourney(await response.json());
}

const showJourney = (told) => at("journey").replaceChildren(waterfall(told));

// ── what a person does ──

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("message").value;
  messages.push({ role: "user", content: text });
  turn("user").append(text);
  let asked;
  try {
    asked = body();
  } catch (error) {
    messages.pop();
    at("status").textContent = `JSON schema or tools: ${error.message}`;
    return;
  }
  at("message").value = "";
  at("status").textContent = "";
  stream = new Answer();
  const options = { method: "POST", body: JSON.stringify(asked), headers: { "content-type": "application/json" } };
  run(ask("v1/chat/completions", { ...options, signal: stream.gate.signal }));
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => stream?.gate.abort());
at("resume").addEventListener("click", () => {
  stream.gate = new AbortController();
  run(ask(`v1/stream/${stream.id}?from=${stream.next}`, { signal: stream.gate.signal }));
});
at("clear").addEventListener("click", () => {
  stream?.gate.abort();
  messages = [];
  stream = null;
  at("turns").replaceChildren();
  setRunning(false);
});

// ── the request, to copy ──

function shown() {
  const asked = body();
  for (const name of ["logprobs", "top_logprobs", "stream_options"]) delete asked[name];
  if (!asked.messages.length) asked.messages = [{ role: "user", content: at("message").value || "Hello" }];
  return { ...asked, stream: false };
}
at("curl").addEventListener("click", () => {
  const text = JSON.stringify(shown(), null, 1).replaceAll("'", "'\\''");
  at("code").textContent = `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json' -H "authorization: Bearer $OCTAVO_API_KEY" -d '${text}'`;
});
at("python").addEventListener("click", () => {
  const { messages: said, stream: _, ...rest } = shown();
  const known = new Set(["model", "temperature", "top_p", "max_tokens", "seed", "stop", "response_format", "tools"]);
  const write = (value) => JSON.stringify(value).replaceAll(/\btrue\b/g, "True").replaceAll(/\bfalse\b/g, "False").replaceAll(/\bnull\b/g, "None");
  const own = Object.entries(rest).filter(([name]) => known.has(name)).map(([name, value]) => `    ${name}=${write(value)},`);
  const extra = Object.entries(rest).filter(([name]) => !known.has(name)).map(([name, value]) => `"${name}": ${write(value)}`);
  if (extra.length) own.push(`    extra_body={${extra.join(", ")}},`);
  at("code").textContent = `import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("OCTAVO_API_KEY", "none"))\nanswer = client.chat.completions.create(\n    messages=${write(said)},\n${own.join("\n")}\n)\nprint(answer.choices[0].message.content)`;
});

model = (await (await ask("v1/models")).json()).data?.[0]?.id ?? "";
at("model").textContent = model;
