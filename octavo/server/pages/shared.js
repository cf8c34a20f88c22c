// What both pages use: asking the server with the key, reading its events, and drawing a journey as a waterfall.

export const STAGES = {
  receive: "#8899aa", parse: "#8899aa", tokenise: "#7788bb", hand_over: "#aab2bd", before: "#aab2bd", queue: "#c98a00",
  prefill: "#2f7fbf", decode: "#3a9d6a", preempted: "#c0453b", recompute: "#8f5fbf", several: "#777777", engine: "#777777",
  detokenise: "#6fa3a0", flush: "#8899aa", answer: "#8899aa",
};

const field = document.getElementById("key"), label = document.getElementById("key-label");
let key = sessionStorage.getItem("octavo-key") || "";

/** fetch with the key. Where the server wants one and has none, the field for it is shown, and this waits until it is filled in. */
export async function ask(path, options = {}) {
  for (;;) {
    const headers = { ...(options.headers || {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    label.hidden = false;
    field.focus();
    key = await new Promise((resolve) => field.addEventListener("change", () => resolve(field.value), { once: true }));
    sessionStorage.setItem("octavo-key", key);
    label.hidden = true;
  }
}

/** The `data` of every event of a response, with the event's name. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      let name = "message", data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data += line.slice(5).trimStart();
      }
      if (data) yield { name, data };
    }
  }
}

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.01 ? 2 : 0)} ms`);

/** In words: what a stage has to say beside its time. */
export function about(stage) {
  const told = [];
  for (const wait of stage.waits || []) {
    const behind = Object.entries(wait.behind || {}).map(([reason, spent]) => `${reason} ${seconds(spent)}`).join(", ");
    told.push(`waited for ${wait.reason} ${seconds(wait.seconds)}${behind ? ` (the first in the queue for ${behind})` : ""}`);
  }
  if (stage.swapped_tokens) told.push(`${stage.swapped_tokens} tokens swapped out`);
  if (stage.dropped_tokens) told.push(`${stage.dropped_tokens} tokens given up`);
  if (stage.cached_tokens) told.push(`${stage.cached_tokens} tokens found`);
  if (stage.computed_tokens) told.push(`${stage.computed_tokens} computed in ${stage.chunks.length} steps`);
  if (stage.steps) told.push(`${stage.output_tokens || 0} tokens in ${stage.steps} steps, ${stage.mean_rows} rows each`);
  if (stage.grammar_seconds) told.push(`grammars ${seconds(stage.grammar_seconds)}`);
  return told.join("; ");
}

/** A journey as a waterfall: one lane for each stage, its words beside it. */
export function waterfall(journey) {
  const box = element("div", "", { class: "fall", role: "list", "aria-label": `journey of ${journey.id}` });
  const whole = Math.max(journey.seconds, 1e-9);
  for (const stage of journey.stages) {
    const lane = element("div", "", { class: "lane" });
    const bar = element("i");
    bar.style.left = `${(stage.start / whole) * 100}%`;
    bar.style.width = `${((stage.end - stage.start) / whole) * 100}%`;
    bar.style.background = STAGES[stage.name] || "#777777";
    lane.append(bar);
    box.append(
      element("span", stage.name, { role: "listitem" }), lane, element("small", `${seconds(stage.end - stage.start)} ${about(stage)}`),
    );
  }
  return box;
}
