// A journey drawn as a waterfall: one bar for each stage, from its start to its end, with its details.

import { count, element, seconds } from "./common.js";

const KINDS = {
  load: "wait", queue: "wait", preempted: "wait", restart: "wait", prefill: "prompt", recompute: "prompt", decode: "decode", several: "decode", engine: "decode",
};
const WAITS = {
  grammar: "its grammar", rows: "a free row", pages: "free pages", budget: "the step's token budget", streams: "running streams' tokens", order: "earlier requests", turn: "other requests' turns", step: "the end of the step",
};

const EXPLANATIONS = {
  engine: "in an engine that has not reported any details",
  load: "its prefix came from --kv-tier",
  restart: "the engine had ended, and another one was starting",
  hand_over: "on its way from the API process to the engine",
};

// Why the prefix cache had no more of a prompt.
const MISSES = {
  new: "no earlier prompt went on like this",
  evicted: "more was in the prefix cache, and was evicted",
  window: "more was in the prefix cache, but not in the layers with a window",
  needed: "the prefix cache was not used: the prompt had to be computed",
  off: "there is no prefix cache",
};

function differs(stage) {
  if (stage.differs_at === undefined) return "";
  const words = stage.differs_text ? `: “${stage.differs_text}”` : "";
  return ` (it differs at token ${count(stage.differs_at)} from request ${stage.differs_from}${words})`;
}

export function waterfall(journey) {
  const whole = Math.max(journey.seconds, 1e-9);
  const list = element("div", { class: "waterfall", role: "list", "aria-label": "stages" });
  for (const stage of journey.stages) {
    const length = stage.end - stage.start;
    const span = element("div", {
      class: "span",
      "data-kind": KINDS[stage.name] || "server",
      style: `left:${((stage.start / whole) * 100).toFixed(3)}%;width:${((length / whole) * 100).toFixed(3)}%`,
    });
    const row = element(
      "div",
      { class: "stage", role: "listitem", "data-stage": stage.name, "data-seconds": length },
      element("span", { text: stage.name.replace("_", " ") }),
      element("div", { class: "track" }, span),
      element("span", { class: "seconds number", text: seconds(length) }),
    );
    const details = describe(stage);
    if (details) row.append(element("div", { class: "note", text: details }));
    list.append(row);
  }
  return list;
}

function describe(stage) {
  const parts = EXPLANATIONS[stage.name] && stage.end - stage.start > 0.02 ? [EXPLANATIONS[stage.name]] : [];
  for (const wait of stage.waits || []) {
    const behind = Object.entries(wait.behind || {}).map(([reason, spent]) => `${WAITS[reason] || reason} ${seconds(spent)}`);
    parts.push(`waited ${seconds(wait.seconds)} for ${WAITS[wait.reason] || wait.reason}` + (behind.length ? ` (which waited for ${behind.join(", ")})` : ""));
  }
  if (stage.swapped_tokens) parts.push(`${count(stage.swapped_tokens)} tokens moved to host pages`);
  if (stage.dropped_tokens) parts.push(`${count(stage.dropped_tokens)} tokens dropped, to be computed again`);
  if (stage.cached_tokens) parts.push(`${count(stage.cached_tokens)} tokens found in the prefix cache`);
  if (MISSES[stage.missed]) parts.push(MISSES[stage.missed] + differs(stage));
  if (stage.computed_tokens) parts.push(`${count(stage.computed_tokens)} tokens computed in ${chunks(stage)}`);
  if (stage.capped_steps) parts.push(capped(stage));
  if (stage.steps) parts.push(`${count(stage.steps)} steps, ${stage.mean_rows.toFixed(1)} rows on average` + (stage.mixed_steps ? `, ${count(stage.mixed_steps)} with prompts of other requests` : ""));
  if (stage.grammar_seconds) parts.push(`${seconds(stage.grammar_seconds)} of it on grammars`);
  if (stage.ms) parts.push(`most steps up to ${most(stage.ms)} ms`);
  if (stage.output_tokens) parts.push(stage.output_tokens === 1 ? "1 token out" : `${count(stage.output_tokens)} tokens out`);
  if (stage.num_stages) parts.push(`${stage.num_stages} stages merged: ` + Object.entries(stage.stages).map(([name, spent]) => `${name} ${seconds(spent)}`).join(", "));
  return parts.join(" · ");
}

// The upper bound of the fullest bucket.
function most(histogram) {
  return Object.entries(histogram).reduce((best, bucket) => (bucket[1] > best[1] ? bucket : best))[0];
}

function chunks(stage) {
  const number = (stage.chunks || []).reduce((sum, chunk) => sum + 1 + (chunk.merged || 0), 0);
  return number === 1 ? "one chunk" : `${number} chunks`;
}

// Why a prompt took more chunks than the step's budget asks for.
function capped(stage) {
  const limit = Math.max(0, ...(stage.chunks || []).map((chunk) => chunk.limit_ms || 0));
  const within = limit ? ` within ${Math.round(limit)} ms` : "";
  const steps = stage.capped_steps === 1 ? "1 step" : `${count(stage.capped_steps)} steps`;
  return `prompt chunks capped in ${steps}, to keep running streams' tokens${within}`;
}

export function facts(journey) {
  const fact = (name, value) => element("span", {}, element("span", { class: "faint", text: `${name} ` }), element("b", { class: "number", text: value }));
  return element(
    "div",
    { class: "facts" },
    fact("state", journey.state + (journey.status ? ` (${journey.status})` : "")),
    fact("total", seconds(journey.seconds)),
    fact("first byte", seconds(journey.first_byte_seconds)),
    fact("prompt", `${count(journey.prompt_tokens)} tokens, ${count(journey.cached_tokens)} cached`),
    fact("output", `${count(journey.output_tokens)} tokens`),
    ...(journey.preemptions ? [fact("preempted", `${journey.preemptions} ×`)] : []),
    fact("finish reason", journey.finish_reasons.filter(Boolean).join(", ") || "–"),
  );
}
