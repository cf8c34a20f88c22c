// The cockpit: follows the live feed and draws it. It shows what the feed says; the page itself measures nothing.

import { ask, colour, copyButton, count, element, events, fillIcons, find, keyDialog, many, percent, seconds, theme, url } from "../shared/common.js";
import { icon } from "../shared/icons.js";
import { Charts, KINDS } from "./charts.js";
import { Batch, PageMap, drawHost, ownerColour } from "./drawing.js";
import { openJourney, journeyButton, touch } from "./inspect.js";
import { Past, SPANS } from "./past.js";
import { keepRows, write } from "./rows.js";

const STAGE_SECONDS = 60; // stage times are averages over the requests that ended in this time
const SPEAK_SECONDS = 15; // while the reason stays the same, announce it to screen readers at most this often
const MAX_ENDED = 200, MAX_ROWS = 60, MAX_TABLE = 250;
const STAGES = [
  ["receive", "① receive", "Open requests, and the time to read and parse one"],
  ["queue", "② queue, schedule", "Requests without a row, and how long requests of the last minute waited"],
  ["tokenize", "③ tokenize", "Time to turn a request's text into token ids, on average over the last minute"],
  ["embed", "④ embed", "Prompt tokens that enter the model; below, those found in the prefix cache"],
  ["transform", "⑤ transform", "Time of a step, and steps per second"],
  ["pages", "⑥ KV pages", "KV pages that requests hold"],
  ["decode", "⑦ decode", "Generated tokens, and rows that decode"],
  ["stream", "⑧ stream", "Finished requests, and the time to write their last bytes"],
];
const REASONS = { grammar: "its grammar", rows: "a free row", pages: "free pages", budget: "the step's token budget", streams: "running streams' tokens", order: "earlier requests", turn: "other requests' turns", step: "the end of the step" };
const LANES = { new: "new", preempted: "preempted", grammar: "waiting for their grammars" };

const map = new PageMap(find("map")), batch = new Batch(find("batch"));
const SPAN = "octavo-span";
const past = new Past(SPANS[localStorage.getItem(SPAN)] ?? SPANS["5 min"]);
const charts = new Charts(find("charts"), () => schedule());
let offset = 0; // from the feed's clock to seconds since 1970
let model = null;
let nextModels = 0; // timer
const MODELS_MS = 2000; // between two looks at which models are loaded
const showKey = keyDialog(() => follow());
let ended = []; // newest first
let state = null;
let isPaused = false, isDue = false;
let following = null, lostAt = "", restartedAt = "";
const HINT_SECONDS = 60;
let isHinting = false, hintedAt = 0;
const spoken = { reason: "", at: 0 };

for (const [name, title, tip] of STAGES) {
  find("line").append(
    element("li", { "data-stage": name, title: tip }, element("div", { class: "name", text: title }), element("div", { class: "value number", text: "–" }), element("div", { class: "more", text: " " })),
  );
}
find("legend").append(
  ...["free", "cached", "shared"].map((name) => element("span", {}, element("i", { "data-colour": name, class: name }), element("span", { id: `count-${name}`, text: name }))),
  element("span", {}, element("i", { class: "owned" }), element("span", { id: "count-owned", text: "used by one request" })),
  ...["held", "loading"].map((name) => element("span", { id: `legend-${name}`, class: "hidden" }, element("i", { "data-colour": name, class: name }), element("span", { id: `count-${name}` }))),
  element("span", { id: "count-ram", class: "hidden" }),
  element("span", { id: "count-tier", class: "hidden" }),
  element("span", { id: "count-host", class: "hidden" }),
  element("span", { id: "count-per", class: "hidden" }),
);

// ── the feed ──
async function follow() {
  following?.abort();
  const mine = (following = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const response = await ask("/v1/live", { signal: mine.signal });
      loadModel();
      loadPast();
      for await (const event of events(response)) {
        if (mine.signal.aborted) return;
        take(JSON.parse(event.data));
        connection("live");
      }
      connection("lost", "the server has closed the feed");
    } catch (error) {
      if (mine.signal.aborted) return;
      connection("lost", error.status ? error.message : "the server cannot be reached");
      if (error.status === 401) {
        showKey();
        return;
      }
    }
    await new Promise((resume) => setTimeout(resume, 800));
  }
}

const clock = () => new Date().toLocaleTimeString("en-GB");

function connection(is, why = "") {
  if (is === "live") lostAt = "";
  else lostAt ||= clock();
  document.body.dataset.stale = is === "lost" && state ? "yes" : "no";
  find("connection").dataset.state = is;
  write(find("connection"), is === "live" ? (restartedAt ? `live · engine restarted ${restartedAt}` : "live") : `no connection since ${lostAt}`);
  if (is === "lost") advise(`${why[0].toUpperCase()}${why.slice(1)}.${state ? ` This page shows the state at ${lostAt}.` : ""} Reconnecting.`, "lost");
}

async function loadModel() {
  try {
    const models = await (await ask("/v1/models")).json();
    model = models.data.find((each) => (each.status ?? "ready") === "ready") ?? models.data[0];
    showModels(models.data);
    write(find("model"), model.max_model_len ? `${model.id} · context ${count(model.max_model_len)}` : model.id);
    find("model").title = find("model").textContent;
    write(find("chat-link-text"), model.capabilities?.includes("completion") ? "Chat" : "Embeddings");
    find("map-card").classList.toggle("hidden", !model.capabilities?.includes("completion")); // an encoder keeps no pages
    schedule();
  } catch {
    // The feed reports the same error.
  }
}

// Several models on one port; the card is hidden where there is one. The rest of the page shows the first one that is loaded.
function showModels(models) {
  const several = models.filter((each) => each.status);
  find("models-card").classList.toggle("hidden", !several.length);
  const rows = several.map((each) => {
    const doing = each.status === "loading" ? `loading for ${seconds(each.loading_seconds)}` : each.status;
    return element("tr", {}, element("td", {}, each.id), element("td", {}, doing), element("td", { class: "right number" }, count(each.waiting ?? 0)));
  });
  find("models").replaceChildren(...rows);
  clearTimeout(nextModels);
  if (several.length) nextModels = setTimeout(loadModel, MODELS_MS);
}

async function loadPast(span = past.span) {
  try {
    await past.load(span);
    schedule();
  } catch {
    // The feed reports what is wrong.
  }
}

function take(news) {
  offset = Date.now() / 1000 - news.time;
  if (news.pages) {
    // The complete map: a new feed begins, perhaps of another engine.
    const bytes = Uint8Array.from(atob(news.pages), (letter) => letter.charCodeAt(0));
    map.codes = new Uint16Array(bytes.buffer);
    if (state && news.totals.steps < state.totals.steps) restartedAt = clock();
    ended = [];
    past.begin();
  }
  for (const [start, codes] of news.changes || []) map.codes.set(codes, start);
  state = news;
  ended = [...news.ended.toReversed(), ...ended].slice(0, MAX_ENDED);
  past.add(news);
  if (past.isStale(news.time)) loadPast();
  batch.rows = news.rows.map(([row, request, choice, isPrompt, stepTokens, length, promptLen, maxLen, pages, owner]) => ({
    row, request, choice, isPrompt, stepTokens, length, promptLen, maxLen, pages, owner, name: request + (choice ? `#${choice}` : ""),
  }));
  if (!isPaused) schedule();
}

// Draw in the next frame: not while the tab is hidden, and at most once a frame.
function schedule() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

const used = () => state.num_pages - state.num_free_pages - state.num_cached_pages;
const mean = (total, number) => (number > 0 ? total / number : null);

// ── drawing ──
function draw() {
  if (!state) return;
  const rate = past.rates();
  drawLine(rate);
  write(find("step"), `step ${count(state.step)}`);
  const isIdle = !state.rows.length && !state.num_waiting;
  if (!lostAt) advise(state.advice || (isIdle ? idleText() : "No request is waiting: all of them are being computed."), state.blocked_by || (state.advice ? "other" : "none"));
  if (!lostAt) askHint();
  if (isIdle || Date.now() / 1000 - hintedAt > 2 * HINT_SECONDS) find("hint").classList.add("hidden"); // it is about the past minutes
  document.body.dataset.idle = isIdle ? "yes" : "no";
  charts.draw(past, state.time, offset);
  drawValues();
  map.draw();
  drawHost(find("host"), state.num_host_pages, state.waiting.filter((wait) => wait[5]).map((wait) => [wait[0], wait[5]]));
  drawLegend();
  drawBatch();
  drawQueue();
  drawEnded();
}

function advise(text, reason) {
  write(find("advice"), text);
  find("advice-card").dataset.waits = reason === "none" ? "no" : "yes";
  const now = Date.now() / 1000;
  if (reason !== spoken.reason || (reason !== "none" && now - spoken.at > SPEAK_SECONDS)) {
    Object.assign(spoken, { reason, at: now });
    write(find("spoken"), text);
  }
}

// What other limits would have done, simulated by the server at low priority: asked for while requests wait, once a minute at most.
async function askHint() {
  if (isHinting || !state.blocked_by || !["rows", "budget", "streams", "pages"].includes(state.blocked_by)) return;
  if (Date.now() / 1000 - hintedAt < HINT_SECONDS) return;
  [isHinting, hintedAt] = [true, Date.now() / 1000];
  try {
    const found = await (await ask("/v1/live/hint")).json();
    write(find("hint"), found.text);
    find("hint").classList.toggle("hidden", !found.text);
  } catch {
    find("hint").classList.add("hidden"); // no recording, or no time for it
  } finally {
    isHinting = false;
  }
}

function stageMeans() {
  const recent = ended.filter((end) => end.at > state.time - STAGE_SECONDS && end.prompt_tokens);
  return (...names) => mean(recent.reduce((sum, end) => sum + names.reduce((part, name) => part + (end.stages[name] || 0), 0), 0), recent.length);
}

function drawLine(rate) {
  const meanOf = stageMeans();
  const prompts = state.rows.filter((row) => row[3]).length, decoding = state.rows.length - prompts;
  const values = {
    receive: [`${count(state.rows.length + state.num_waiting)} open`, `parsed in ${seconds(meanOf("receive", "parse"))}`],
    queue: [`${count(state.num_waiting)} waiting`, state.num_waiting ? `oldest ${seconds(Math.max(...state.lanes.map((lane) => lane[2])))}` : `waited ${seconds(meanOf("queue", "preempted"))}`],
    tokenize: [seconds(meanOf("tokenise")), "per request"],
    embed: [`${count(rate.prompt_tokens)}/s`, `${count(rate.cached_tokens)}/s cached`],
    transform: [`${seconds(mean(rate.busy_seconds, rate.steps))}`, `per step · ${rate.steps.toFixed(0)}/s`],
    pages: [percent(used() / Math.max(1, state.num_pages)), `${count(used())} of ${count(state.num_pages)}`],
    decode: [`${count(rate.generation_tokens)}/s`, `tokens · ${many(decoding, "row")}`],
    stream: [`${rate.finished.toFixed(1)}/s`, `ended · sent ${seconds(meanOf("detokenise", "flush"))}`],
  };
  for (const item of find("line").children) {
    const [value, more] = values[item.dataset.stage];
    write(item.children[1], value);
    write(item.children[2], more);
  }
}

function idleText() {
  const last = ended[0], ago = last ? state.time - last.at : 0;
  const since = !last ? "No request has come since the server's start" : ago < 2 ? "The last request has just finished" : `The last request finished ${ago < 90 ? `${Math.round(ago)} s` : ago < 5400 ? `${Math.round(ago / 60)} min` : `${Math.round(ago / 3600)} h`} ago`;
  return `Idle: nothing to compute. ${model ? `${model.id} is loaded and ready` : "The model is ready"}. ${since}.`;
}

function drawValues() {
  for (const { id, format } of KINDS) {
    const now = past.now(id), value = find(`value-${id}`);
    const latest = now ?? charts.series.findLast((figures) => figures[id] !== null)?.[id] ?? null;
    write(value, format(latest));
    value.classList.toggle("old", now === null); // no current value: the last known one is shown
    value.title = now === null ? "the latest value in the shown time" : "now";
  }
}

function drawLegend() {
  for (const mark of document.querySelectorAll("[data-colour]")) mark.style.background = colour(mark.dataset.colour);
  document.querySelector(".legend .owned").style.background = `linear-gradient(135deg, ${ownerColour(1)} 33%, ${ownerColour(2)} 33% 66%, ${ownerColour(3)} 66%)`;
  write(find("count-free"), `free ${count(state.num_free_pages)}`);
  write(find("count-cached"), `cached ${count(state.num_cached_pages)}`);
  write(find("count-shared"), `shared ${count(state.num_shared_pages)}`);
  write(find("count-owned"), `used by one request ${count(used() - state.num_shared_pages)}`);
  find("legend-held").classList.toggle("hidden", !state.num_held_pages);
  write(find("count-held"), `of the cached ones, held for conversations and pins ${count(state.num_held_pages ?? 0)}`);
  find("legend-loading").classList.toggle("hidden", !state.num_loading_pages);
  write(find("count-loading"), `being loaded ${count(state.num_loading_pages ?? 0)}`);
  find("count-ram").classList.toggle("hidden", !state.num_ram_pages);
  write(find("count-ram"), `in host memory ${count(state.num_ram_pages ?? 0)} (${((state.ram_tier_bytes ?? 0) / 2 ** 20).toFixed(0)} MiB)`);
  find("count-tier").classList.toggle("hidden", !state.num_tier_pages);
  write(find("count-tier"), `on disk ${count(state.num_tier_pages ?? 0)} (${((state.tier_bytes ?? 0) / 2 ** 20).toFixed(0)} MiB)`);
  find("count-host").classList.toggle("hidden", !state.num_host_pages);
  write(find("count-host"), `swapped out ${count(state.num_host_pages_used)} of ${count(state.num_host_pages)}`);
  find("count-per").classList.toggle("hidden", map.per === 1);
  write(find("count-per"), `one cell is ${map.per} pages`);
}

function drawBatch() {
  batch.draw();
  const rows = batch.rows, prompts = rows.filter((row) => row.isPrompt).length, tokens = rows.reduce((sum, row) => sum + row.stepTokens, 0);
  write(find("batch-note"), rows.length
    ? `${count(rows.length)} of ${count(state.max_rows)} rows: ${count(prompts)} ${prompts === 1 ? "computes its prompt" : "compute their prompts"}, ${count(rows.length - prompts)} decode; ${count(tokens)} of ${count(state.max_step_tokens)} tokens in this step`
    : `0 of ${count(state.max_rows)} rows are in use`);
  if (!find("batch-details").open) return;
  keepRows(
    find("batch-rows"),
    rows.slice(0, MAX_TABLE),
    (row) => `${row.request}#${row.choice}`,
    (row) => [cell("right number"), element("td", { class: "id" }, journeyButton(row.request, row.name)), cell(), cell("right number"), cell("right number"), cell("right number")],
    (cells, row) => [count(row.row), null, `${row.isPrompt ? "prompt" : "decode"} +${count(row.stepTokens)}`, count(row.length), count(row.maxLen), count(row.pages)].forEach((text, at) => text !== null && write(cells[at], text)),
  );
}

const cell = (kind = "") => element("td", { class: kind });

function drawQueue() {
  const most = Math.max(1, ...state.lanes.map((lane) => lane[1]));
  find("lanes").replaceChildren(
    ...state.lanes.map(([name, number, oldest]) => {
      const bar = element("div", { class: "bar", style: `width:${((100 * number) / most).toFixed(1)}%` });
      const words = `${LANES[name] || name}${oldest ? `, oldest ${seconds(oldest)}` : ""}`;
      return element("div", { class: "lane" }, element("span", { class: "number", text: count(number) }), element("div", {}, bar, element("span", { text: words })));
    }),
  );
  find("none-waiting").classList.toggle("hidden", state.num_waiting > 0);
  showReplicas(state.replicas ?? []);
  keepRows(
    find("queue"),
    state.waiting.slice(0, MAX_ROWS),
    (wait) => wait[0],
    (wait) => [element("td", { class: "id" }, journeyButton(wait[0])), cell(), cell("right number"), cell("right number")],
    (cells, [, reason, since, promptLen, isPreempted]) => {
      write(cells[1], `${REASONS[reason] || reason}${isPreempted ? " (preempted)" : ""}`);
      write(cells[2], seconds(since));
      write(cells[3], count(promptLen));
    },
  );
}

// Why the prefix cache had no more of a finished request's prompt, where more could have been there.
function missed(end) {
  const why = end.cache_miss === "evicted" ? "more was evicted" : end.cache_miss === "new" && end.differs_at != null ? `differs at token ${count(end.differs_at)}` : "";
  return why ? [element("small", { class: "faint", text: `${count(end.cached_tokens)} cached, ${why}` })] : [];
}

function drawEnded() {
  find("none-ended").classList.toggle("hidden", ended.length > 0);
  keepRows(
    find("ended"),
    ended.slice(0, MAX_ROWS),
    (end) => end.number,
    (end) => {
      const sum = (...names) => names.reduce((total, name) => total + (end.stages[name] || 0), 0);
      const parts = [["wait", sum("model", "adapter", "load", "queue", "preempted", "restart")], ["prompt", sum("prefill", "recompute")], ["decode", sum("decode", "several", "engine")]];
      const bar = element("div", { class: "mini", title: parts.map(([, spent]) => seconds(spent)).join(" · ") });
      bar.append(...parts.map(([kind, spent]) => element("i", { "data-kind": kind, style: `width:${((100 * spent) / Math.max(1e-9, end.seconds)).toFixed(1)}%` })));
      const status = element("td", { class: `right number${end.status >= 400 ? " bad" : ""}`, text: end.status === 499 ? "aborted" : end.status });
      return [
        element("td", { class: "id" }, journeyButton(end.id)),
        status,
        element("td", { class: "right number", text: `${count(end.prompt_tokens)} → ${count(end.output_tokens)}` }),
        element("td", { class: "right number", text: seconds(end.seconds) }),
        element(
          "td",
          { class: "wide" },
          element("div", { class: "in" }, bar, ...missed(end), ...(end.preemptions ? [element("small", { class: "faint", text: `preempted ${end.preemptions} ×` })] : [])),
          element("span", { class: "unseen", text: parts.map(([kind, spent]) => `${kind} ${seconds(spent)}`).join(", ") }),
        ),
      ];
    },
    () => {},
  );
}

// ── pages and rows, by pointer and by keyboard ──
touch({
  map,
  batch,
  rows: () => batch.rows,
  redraw: () => {
    map.draw();
    batch.draw();
  },
});

function pause(isWanted) {
  isPaused = isWanted;
  find("pause").replaceChildren(icon(isPaused ? "play" : "pause"));
  find("pause").title = isPaused ? "Go on" : "Pause this page; the server goes on";
  find("pause").setAttribute("aria-label", find("pause").title);
  find("pause").setAttribute("aria-pressed", String(isPaused));
  if (!isPaused) schedule();
}

find("pause").addEventListener("click", () => pause(!isPaused));
for (const [name, span] of Object.entries(SPANS)) {
  find("spans").append(element("button", { type: "button", text: name, "aria-pressed": String(span === past.span), onclick: (event) => {
    for (const button of find("spans").children) button.setAttribute("aria-pressed", String(button === event.target));
    localStorage.setItem(SPAN, name);
    loadPast(span);
  } }));
}
const example = () => `curl ${new URL(url("/v1"), location.href).href}/${model?.capabilities?.includes("completion") === false ? "embeddings" : "chat/completions"} -H "Content-Type: application/json" -d '${JSON.stringify(model?.capabilities?.includes("completion") === false ? { input: "Hello" } : { messages: [{ role: "user", content: "Hello" }] })}'`;
find("try-box").append(copyButton("Copy a first request for a terminal", example));
fillIcons();
pause(false);
find("batch-details").addEventListener("toggle", schedule);
theme(find("theme"), schedule);
addEventListener("resize", schedule);
find("journey-close").addEventListener("click", () => find("journey").close());
if (location.hash.length > 1) openJourney(decodeURIComponent(location.hash.slice(1)));
follow();

// A fleet's replicas; the card is hidden where there is one engine. The page map and the batch show all of them, one after the other.
function showReplicas(replicas) {
  find("replicas-card").classList.toggle("hidden", !replicas.length);
  keepRows(
    find("replicas"), replicas, (each) => each.replica,
    () => [cell("right number"), cell(), ...Array.from({ length: 6 }, () => cell("right number")), cell("wide")],
    (cells, each) => {
      const totals = each.totals, used = each.num_pages - each.num_free_pages - each.num_cached_pages;
      const share = totals && totals.prompt_tokens ? totals.cached_tokens / totals.prompt_tokens : 0;
      const figures = totals
        ? [`${each.num_rows} of ${each.max_rows}`, count(each.num_waiting), seconds(each.waiting_seconds), `${count(used)} of ${count(each.num_pages)}`, `${Math.round(100 * share)} %`]
        : ["–", "–", "–", "–", "–"];
      [count(each.replica), each.status, ...figures, count(each.restarts), each.place].forEach((text, at) => write(cells[at], text));
    },
  );
}
