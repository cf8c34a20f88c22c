// The cockpit: draws what /v1/live says. Only what changed is drawn; pages are cells of a canvas.
import { STAGES, ask, element, events, seconds, waterfall } from "./shared.js";

const at = (id) => document.getElementById(id);
const FREE = 0, CACHED = 1, SHARED = 2;
const PAST_SECONDS = 300, MAX_LISTED = 200, MAX_ENDED = 50, RATE_SECONDS = 3;
let pages = new Uint16Array(0), state = null, names = new Map(), cursor = -1;
const past = [], ended = [], numbers = { "first token": [], "between tokens": [], "tokens per second": [], "pages in use": [] };

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ownerColor = (code) => `hsl(${(code * 137.508) % 360} 45% 52%)`;

// ── the feed ──

async function follow() {
  for (;;) {
    try {
      const models = await (await ask("v1/models")).json();
      at("model").textContent = models.data?.[0]?.id ?? "";
      const response = await ask("v1/live");
      if (!response.ok) throw new Error((await response.json()).error.message);
      at("status").textContent = "live";
      for await (const { data } of events(response)) take(JSON.parse(data));
      throw new Error("the server ended the feed");
    } catch (error) {
      at("status").textContent = `${error.message}; trying again`;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

function take(told) {
  state = told;
  const changed = told.changes ?? [];
  if (told.pages) {
    const bytes = Uint8Array.from(atob(told.pages), (letter) => letter.charCodeAt(0));
    pages = new Uint16Array(bytes.buffer);
    layOut();
  }
  for (const [start, codes] of changed) codes.forEach((code, i) => { pages[start + i] = code; drawPage(start + i); });
  names = new Map(told.rows.map((row) => [row[9], row[1]]));
  past.push(told);
  while (past.length > 2 && past[0].time < told.time - RATE_SECONDS) past.shift();
  for (const end of told.ended) ended.unshift(end);
  ended.length = Math.min(ended.length, MAX_ENDED);
  drawLine(); drawNumbers(); drawBatch(); drawQueue();
  if (told.ended.length) drawEnded();
  at("advice").textContent = told.advice || "Nothing has to wait.";
  at("advice").classList.toggle("waiting", Boolean(told.advice));
  at("num-free").textContent = told.num_free_pages;
  at("num-cached").textContent = told.num_cached_pages;
  at("num-shared").textContent = told.num_shared_pages;
  at("num-owned").textContent = told.num_pages - told.num_free_pages - told.num_cached_pages - told.num_shared_pages;
  at("num-swapped").textContent = told.num_host_pages_used;
}

// ── the assembly line ──

const mean = (name) => {
  const values = ended.map((end) => end.stages[name]).filter((value) => value !== undefined);
  return values.length ? seconds(values.reduce((a, b) => a + b, 0) / values.length) : "–";
};

function drawLine() {
  const prompts = state.rows.filter((row) => row[3]), decodes = state.rows.filter((row) => !row[3]);
  const sum = (rows) => rows.reduce((total, row) => total + row[4], 0);
  const used = state.num_pages - state.num_free_pages - state.num_cached_pages;
  const cells = [
    ["① receive", state.totals.finished, `ended so far; read ${mean("receive")}`],
    ["② queue", state.num_waiting, `wait; ${mean("queue")}`],
    ["③ tokenise", mean("tokenise"), "a prompt"],
    ["④ embed", sum(state.rows), "tokens in the last step"],
    ["⑤ transform", prompts.length, `rows compute prompts, ${sum(prompts)} tokens; ${mean("prefill")}`],
    ["⑥ KV pages", used, `of ${state.num_pages} in use`],
    ["⑦ decode", decodes.length, `rows decode; ${mean("decode")}`],
    ["⑧ stream", `${rate("generation_tokens").toFixed(0)}/s`, `tokens; flush ${mean("flush")}`],
  ];
  const line = at("line");
  if (!line.children.length) for (const [name] of cells) {
    const cell = element("li", name);
    cell.append(element("b"), element("span"));
    line.append(cell);
  }
  cells.forEach(([, value, words], i) => {
    line.children[i].children[0].textContent = value;
    line.children[i].children[1].textContent = words;
    line.children[i].children[1].title = words;
  });
}

function rate(name) {
  const first = past[0], last = past[past.length - 1];
  return last.time > first.time ? (last.totals[name] - first.totals[name]) / (last.time - first.time) : 0;
}

// ── sparklines ──

function drawNumbers() {
  const ratio = (total, count) => (rate(count) > 0 ? rate(total) / rate(count) : null);
  const used = (state.num_pages - state.num_free_pages - state.num_cached_pages) / Math.max(1, state.num_pages);
  const values = {
    "first token": [ratio("first_token_seconds", "first_tokens"), seconds],
    "between tokens": [ratio("token_gap_seconds", "token_gaps"), seconds],
    "tokens per second": [rate("generation_tokens"), (value) => value.toFixed(0)],
    "pages in use": [used, (value) => `${(value * 100).toFixed(0)} %`],
  };
  for (const [name, [value, write]] of Object.entries(values)) {
    const points = numbers[name];
    points.push([state.time, value]);
    while (points[0][0] < state.time - PAST_SECONDS) points.shift();
    const figure = at(`tile-${name}`) ?? tile(name);
    figure.querySelector("b").textContent = value === null ? "–" : write(value);
    spark(figure.querySelector("canvas"), points, name === "pages in use" ? 1 : 0);
  }
}

function tile(name) {
  const figure = element("figure", "", { id: `tile-${name}` }), caption = element("figcaption", name);
  caption.append(element("b"));
  figure.append(caption, element("canvas", "", { role: "img", "aria-label": `${name} over the last five minutes` }));
  at("numbers").append(figure);
  return figure;
}

function fit(canvas) {
  const scale = devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return canvas.getContext("2d");
}

function spark(canvas, points, top) {
  const pen = fit(canvas), { width, height } = canvas;
  const most = top || Math.max(1e-9, ...points.map(([, value]) => value ?? 0)) * 1.1;
  const end = points[points.length - 1][0], span = Math.max(30, end - points[0][0]);
  pen.clearRect(0, 0, width, height);
  pen.strokeStyle = color("--accent");
  pen.lineWidth = devicePixelRatio || 1;
  pen.beginPath();
  let down = false;
  for (const [time, value] of points) {
    if (value === null) { down = false; continue; }
    const x = width * (1 - (end - time) / span), y = height - 1 - (height - 2) * (value / most);
    if (down) pen.lineTo(x, y); else pen.moveTo(x, y);
    down = true;
  }
  pen.stroke();
}

// ── the page map ──

let columns = 1, cell = 8;

function layOut() {
  const canvas = at("pages");
  fit(canvas);
  cell = Math.max(2, Math.floor(Math.sqrt((canvas.width * canvas.height) / Math.max(1, pages.length))));
  while (cell > 1 && Math.ceil(pages.length / Math.floor(canvas.width / cell)) * cell > canvas.height) cell -= 1;
  columns = Math.max(1, Math.floor(canvas.width / cell));
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  for (let page = 0; page < pages.length; page += 1) drawPage(page);
}

function drawPage(page) {
  const pen = at("pages").getContext("2d"), code = pages[page], gap = cell > 3 ? 1 : 0;
  pen.fillStyle = code === FREE ? color("--free") : code === CACHED ? color("--cached") : code === SHARED ? color("--shared") : ownerColor(code);
  pen.fillRect((page % columns) * cell, Math.floor(page / columns) * cell, cell - gap, cell - gap);
}

async function tellPage(page) {
  if (page < 0 || page >= pages.length) return;
  cursor = page;
  const code = pages[page], box = at("page-told");
  if (code === FREE) box.textContent = `Page ${page} is free.`;
  else if (code === CACHED) box.textContent = `Page ${page} holds a prefix that nobody uses now.`;
  else if (code === SHARED) {
    const { owners } = await (await ask(`v1/live/pages/${page}`)).json();
    if (cursor === page) box.textContent = `Page ${page} is shared by ${owners.join(", ") || "nobody any more"}.`;
  } else box.textContent = `Page ${page} belongs to ${names.get(code) ?? "a request that has just left"}.`;
}

const canvas = at("pages");
canvas.addEventListener("pointermove", (event) => {
  const scale = devicePixelRatio || 1, column = Math.floor((event.offsetX * scale) / cell);
  const page = Math.floor((event.offsetY * scale) / cell) * columns + column;
  if (column < columns && page !== cursor) tellPage(page);
});
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -cursor, End: pages.length - 1 - cursor }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  tellPage(Math.min(Math.max(cursor + step, 0), pages.length - 1));
});
addEventListener("resize", layOut);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layOut);

// ── tables ──

function fill(body, lines) {
  while (body.rows.length > lines.length) body.deleteRow(-1);
  lines.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    cells.forEach((text, j) => {
      const place = row.cells[j] ?? row.insertCell();
      if (text instanceof Node) place.replaceChildren(text);
      else if (place.textContent !== String(text)) place.textContent = text;
    });
  });
}

function drawBatch() {
  const { rows } = state;
  at("batch-count").textContent = `${rows.length} of ${state.max_rows} rows${rows.length > MAX_LISTED ? `, the first ${MAX_LISTED}` : ""}`;
  fill(at("batch"), rows.slice(0, MAX_LISTED).map(([row, request, choice, isPrompt, tokens, length, , most, count]) =>
    [row, choice ? `${request}#${choice}` : request, isPrompt ? `prompt, ${tokens} tokens` : `decode, ${tokens}`, `${length} / ${most}`, count]));
}

function drawQueue() {
  at("queue-count").textContent = `${state.num_waiting}${state.num_waiting > state.waiting.length ? `, the first ${state.waiting.length}` : ""}`;
  fill(at("queue"), state.waiting.map(([request, reason, waited, prompt, isPreempted]) =>
    [request, reason === "order" ? "those before it" : `${reason}${isPreempted ? " (preempted)" : ""}`, waited.toFixed(1), prompt]));
}

function bar(end) {
  const box = element("span", "", { class: "bar", role: "img", "aria-label": Object.entries(end.stages).map(([name, spent]) => `${name} ${seconds(spent)}`).join(", ") });
  for (const [name, spent] of Object.entries(end.stages)) {
    const part = element("i", "", { title: `${name} ${seconds(spent)}` });
    part.style.width = `${(spent / Math.max(end.seconds, 1e-9)) * 100}%`;
    part.style.background = STAGES[name] ?? "#777777";
    box.append(part);
  }
  return box;
}

function drawEnded() {
  fill(at("ended"), ended.map((end) => {
    const link = element("button", end.id, { type: "button" });
    link.addEventListener("click", () => show(end.id));
    return [link, end.status, end.seconds.toFixed(3), `${end.prompt_tokens} → ${end.output_tokens}`, bar(end)];
  }));
}

async function show(id) {
  const response = await ask(`v1/requests/${encodeURIComponent(id)}`), told = await response.json();
  at("journey").replaceChildren(response.ok ? waterfall(told) : element("p", told.error.message));
  at("journey").focus();
}

follow();
