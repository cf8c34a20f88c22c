// The cockpit: follows the live feed and draws it. What it shows is what the feed says; nothing is made up here.
// Knows nothing of how the server comes to its numbers.

import { ask, colour, count, element, events, find, keyDialog, percent, seconds, theme } from "./common.js";
import { PageMap, drawBatch, drawHost, drawSpark, ownerColour, shorten } from "./drawing.js";
import { facts, waterfall } from "./waterfall.js";

const SPAN_SECONDS = 300; // of the sparklines
const RATE_SECONDS = 3; // rates are means over this long
const STAGE_SECONDS = 60; // stages' times are means over what ended in this long
const MAX_ENDED = 200;
const STAGES = [
  ["receive", "① receive"], ["queue", "② queue, schedule"], ["tokenize", "③ tokenize"], ["embed", "④ embed"],
  ["transform", "⑤ transform"], ["pages", "⑥ KV pages"], ["decode", "⑦ decode"], ["stream", "⑧ stream"],
];
const REASONS = { grammar: "its grammar", rows: "a free row", pages: "free pages", budget: "token budget", order: "those before", step: "the step's end" };

const map = new PageMap(find("map"));
const showKey = keyDialog(() => follow());
const ended = []; // newest first
const past = []; // [time, totals]
const sparks = { ttft: [], itl: [], rate: [], pages: [] };
let state = null;
let isPaused = false;
let following = null;

for (const [name, title] of STAGES) {
  find("line").append(
    element("li", { "data-stage": name }, element("div", { class: "name", text: title }), element("div", { class: "value number", text: "–" }), element("div", { class: "more", text: " " })),
  );
}
find("legend").append(
  ...[["free", "free"], ["cached", "cached"], ["shared", "shared"]].map(([name, text]) => element("span", {}, element("i", { "data-colour": name }), element("span", { id: `count-${name}`, text }))),
  element("span", {}, element("i", { "data-colour": "" }), element("span", { id: "count-owned", text: "one request's" })),
  element("span", { id: "count-host", class: "hidden" }),
);

// ── the feed ──
async function follow() {
  following?.abort();
  const mine = (following = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await ask("/v1/live", { signal: mine.signal });
      connection("live", "live");
      loadModel();
      for await (const event of events(response)) {
        if (mine.signal.aborted) return;
        take(JSON.parse(event.data));
      }
      connection("lost", "the server has ended the feed");
    } catch (error) {
      if (mine.signal.aborted) return;
      connection("lost", error.status ? error.message : "no connection");
      if (error.status === 401) {
        showKey();
        return;
      }
    }
    await new Promise((resume) => setTimeout(resume, 1500));
  }
}

function connection(is, text) {
  const pill = find("connection");
  if (pill.dataset.state !== is || pill.textContent !== text) {
    pill.dataset.state = is;
    pill.textContent = text;
  }
}

async function loadModel() {
  try {
    const models = await (await ask("/v1/models")).json();
    find("model").textContent = `${models.data[0].id} · context ${count(models.data[0].max_model_len)}`;
  } catch {
    // Told by the feed's own error.
  }
}

function take(news) {
  if (news.pages) {
    const bytes = Uint8Array.from(atob(news.pages), (letter) => letter.charCodeAt(0));
    map.codes = new Uint16Array(bytes.buffer);
  }
  for (const [start, codes] of news.changes || []) map.codes.set(codes, start);
  if (state && news.totals.steps < state.totals.steps) past.length = 0; // a new engine counts from 0
  state = news;
  for (const end of news.ended) ended.unshift({ ...end, at: news.time });
  ended.length = Math.min(ended.length, MAX_ENDED);
  past.push([news.time, news.totals]);
  while (past.length > 2 && past[0][0] < news.time - RATE_SECONDS) past.shift();
  note(news);
  if (!isPaused) draw(news.ended.length > 0);
}

function rates() {
  const [before, old] = past[0], [now, fresh] = past[past.length - 1];
  const span = now - before;
  return Object.fromEntries(Object.entries(fresh).map(([name, value]) => [name, span > 0 ? (value - old[name]) / span : 0]));
}

const used = () => state.num_pages - state.num_free_pages - state.num_cached_pages;
const mean = (total, number) => (number > 0 ? total / number : null);

function note(news) {
  const rate = rates();
  const values = {
    ttft: mean(rate.first_token_seconds, rate.first_tokens),
    itl: mean(rate.token_gap_seconds, rate.token_gaps),
    rate: past.length > 1 ? rate.generation_tokens : null,
    pages: used() / Math.max(1, state.num_pages),
  };
  for (const [name, points] of Object.entries(sparks)) {
    points.push([news.time, values[name]]);
    while (points.length && points[0][0] < news.time - SPAN_SECONDS) points.shift();
  }
}

// ── drawing ──
function draw(hasEnded) {
  if (!state) return;
  const rate = rates();
  drawLine(rate);
  find("step").textContent = `step ${count(state.step)}`;
  const advice = state.advice || (state.rows.length ? "Nothing has to wait." : "Nothing to do: no request is here.");
  if (find("advice").textContent !== advice) find("advice").textContent = advice;
  find("advice-card").dataset.waits = state.advice ? "yes" : "no";
  for (const [name, format] of [["ttft", seconds], ["itl", seconds], ["rate", (value) => (value === null ? "–" : count(value))], ["pages", percent]]) {
    const points = sparks[name];
    const latest = points.length ? points[points.length - 1][1] : null;
    find(`value-${name}`).textContent = format(latest);
    drawSpark(find(`spark-${name}`), points, SPAN_SECONDS, state.time);
  }
  map.draw();
  drawHost(find("host"), state.num_host_pages, state.waiting.filter((wait) => wait[5]).map((wait) => [wait[0], wait[5]]));
  drawLegend();
  const rows = state.rows.map(([row, request, choice, isPrompt, stepTokens, length, promptLen, maxLen, pages, owner]) => ({ row, request, choice, isPrompt, stepTokens, length, promptLen, maxLen, pages, owner }));
  drawBatch(find("batch"), rows, state.max_rows);
  const prompts = rows.filter((row) => row.isPrompt), tokens = rows.reduce((sum, row) => sum + row.stepTokens, 0);
  find("batch-told").textContent = `${rows.length} of ${state.max_rows} rows: ${prompts.length} compute their prompts, ${rows.length - prompts.length} decode; ${count(tokens)} of ${count(state.max_step_tokens)} tokens in this step`;
  drawQueue();
  if (hasEnded || !find("ended").childElementCount) drawEnded();
}

function stageMeans() {
  const recent = ended.filter((end) => end.at > state.time - STAGE_SECONDS);
  return (...names) => mean(recent.reduce((sum, end) => sum + names.reduce((part, name) => part + (end.stages[name] || 0), 0), 0), recent.length);
}

function drawLine(rate) {
  const meanOf = stageMeans();
  const prompts = state.rows.filter((row) => row[3]).length;
  const values = {
    receive: [`${count(state.rows.length + state.num_waiting)} here`, `read and parse ${seconds(meanOf("receive", "parse"))}`],
    queue: [`${count(state.num_waiting)} waiting`, `queued ${seconds(meanOf("queue", "preempted"))}`],
    tokenize: [seconds(meanOf("tokenise")), "a request"],
    embed: [`${count(rate.prompt_tokens)}/s`, `prompt tokens, ${count(rate.cached_tokens)}/s cached`],
    transform: [`${seconds(mean(rate.busy_seconds, rate.steps))}`, `a step, ${rate.steps.toFixed(0)} steps/s`],
    pages: [percent(used() / Math.max(1, state.num_pages)), `${count(used())} of ${count(state.num_pages)} in use`],
    decode: [`${count(rate.generation_tokens)}/s`, `tokens, ${state.rows.length - prompts} rows`],
    stream: [`${rate.finished.toFixed(1)}/s`, `ended, ${seconds(meanOf("detokenise", "flush"))} to flush`],
  };
  for (const item of find("line").children) {
    const [value, more] = values[item.dataset.stage];
    item.children[1].textContent = value;
    item.children[2].textContent = more;
  }
}

function drawLegend() {
  for (const mark of document.querySelectorAll("[data-colour]")) {
    mark.style.background = mark.dataset.colour ? colour(mark.dataset.colour) : ownerColour(5);
  }
  find("count-free").textContent = `free ${count(state.num_free_pages)}`;
  find("count-cached").textContent = `cached ${count(state.num_cached_pages)}`;
  find("count-shared").textContent = `shared ${count(state.num_shared_pages)}`;
  find("count-owned").textContent = `one request's ${count(used() - state.num_shared_pages)}`;
  find("count-host").classList.toggle("hidden", !state.num_host_pages);
  find("count-host").textContent = `swapped out ${count(state.num_host_pages_used)} of ${count(state.num_host_pages)}`;
}

function drawQueue() {
  const byReason = new Map();
  for (const wait of state.waiting) byReason.set(wait[1], (byReason.get(wait[1]) || 0) + 1);
  find("lanes").replaceChildren(
    ...[...byReason].map(([reason, number]) => {
      const bar = element("div", { class: "bar" });
      bar.style.width = `${(100 * number) / state.waiting.length}%`;
      return element("div", { class: "lane" }, element("span", { text: REASONS[reason] || reason }), element("span", { class: "number", text: count(number) }), bar);
    }),
  );
  find("queue").replaceChildren(
    ...state.waiting.slice(0, 100).map(([request, reason, since, promptLen, isPreempted]) =>
      element(
        "tr",
        {},
        element("td", {}, journeyButton(request)),
        element("td", { text: (REASONS[reason] || reason) + (isPreempted ? ", preempted" : "") }),
        element("td", { class: "right number", text: seconds(since) }),
        element("td", { class: "right number", text: count(promptLen) }),
      ),
    ),
  );
}

function drawEnded() {
  if (!ended.length) {
    find("ended").replaceChildren(element("tr", {}, element("td", { class: "faint", colspan: 7, text: "No request has ended since this page was opened." })));
    return;
  }
  find("ended").replaceChildren(
    ...ended.slice(0, 60).map((end) => {
      const of = (...names) => seconds(names.reduce((sum, name) => sum + (end.stages[name] || 0), 0));
      return element(
        "tr",
        {},
        element("td", {}, journeyButton(end.id)),
        element("td", { class: "right number", text: end.status }),
        element("td", { class: "right number", text: `${count(end.prompt_tokens)} → ${count(end.output_tokens)}` }),
        element("td", { class: "right number", text: seconds(end.seconds) }),
        element("td", { class: "right number", text: of("queue", "preempted") }),
        element("td", { class: "right number", text: of("prefill", "recompute") }),
        element("td", { class: "right number", text: of("decode") }),
      );
    }),
  );
}

// ── journeys ──
const journeyButton = (id) => element("button", { type: "button", text: shorten(id, 26), title: id, onclick: () => showJourney(id) });

async function showJourney(id) {
  find("journey-id").textContent = id;
  find("journey-body").replaceChildren(element("p", { class: "faint", text: "…" }));
  find("journey").showModal();
  try {
    const journey = await (await ask(`/v1/requests/${encodeURIComponent(id)}`)).json();
    find("journey-body").replaceChildren(facts(journey), waterfall(journey));
    if (journey.error) find("journey-body").append(element("p", { text: journey.error }));
  } catch (error) {
    find("journey-body").replaceChildren(element("p", { text: error.message }));
  }
}
find("journey-close").addEventListener("click", () => find("journey").close());

// ── pages by pointer and by keyboard ──
const KINDS = ["free", "cached: nobody's now, kept for a prompt that begins alike", "shared"];

function tellPage(page) {
  const code = map.codes[page];
  if (code < KINDS.length) return `page ${page}: ${KINDS[code]}`;
  const owner = state?.rows.find((row) => row[9] === code);
  return `page ${page}: ` + (owner ? `of ${owner[1]}${owner[2] ? `, choice ${owner[2]}` : ""}` : "of one request");
}

let asked = 0;
async function namePage(page, show) {
  show(tellPage(page));
  if (map.codes[page] < 2) return;
  const turn = ++asked;
  await new Promise((resume) => setTimeout(resume, 120)); // a pointer that passes asks nothing
  if (turn !== asked) return;
  try {
    const { owners } = await (await ask(`/v1/live/pages/${page}`)).json();
    if (turn === asked && owners.length) show(`page ${page}: ${owners.length > 1 ? "shared by" : "of"} ${owners.join(", ")}`);
  } catch {
    // What the map says has been shown.
  }
}

find("map").addEventListener("pointermove", (event) => {
  const page = map.at(event), tip = find("tip");
  tip.classList.toggle("hidden", page < 0);
  if (page < 0) return;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 320)}px`;
  tip.style.top = `${event.clientY + 14}px`;
  if (tip.dataset.page === String(page)) return;
  tip.dataset.page = page;
  namePage(page, (text) => (tip.textContent = text));
});
find("map").addEventListener("pointerleave", () => {
  asked++;
  find("tip").classList.add("hidden");
  delete find("tip").dataset.page;
});
find("map").addEventListener("keydown", (event) => {
  if (map.move(event.key)) {
    event.preventDefault();
    map.draw();
    find("page-told").textContent = tellPage(map.cursor);
  } else if (event.key === "Enter" && map.cursor >= 0) {
    namePage(map.cursor, (text) => (find("page-told").textContent = text));
  }
});

find("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  find("pause").textContent = isPaused ? "Resume" : "Pause";
  if (!isPaused) draw(true);
});
theme(find("theme"), () => draw(true));
addEventListener("resize", () => draw(false));
follow();
