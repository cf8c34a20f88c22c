// A journey drawn as a waterfall: one bar for each stage, from its start to its end, with its details.

import { count, element, seconds } from "./common.js";

const KINDS = {
  queue: "wait", preempted: "wait", restart: "wait", prefill: "prompt", recompute: "prompt", decode: "decode", several: "decode", engine: "decode",
};
const WAITS = {
  grammar: "its grammar to be compiled", rows: "a free row", pages: "free pages", budget: "room in the step's tokens", order: "those before it", step: "the step that ran",
};

const TOLD = {
  engine: "an engine had it, and did not tell what it did",
  restart: "that engine had ended, and another one was started",
  hand_over: "on its way from the API process to the engine",
};

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
    const told = tell(stage);
    if (told) row.append(element("div", { class: "told", text: told }));
    list.append(row);
  }
  return list;
}

function tell(stage) {
  const parts = TOLD[stage.name] && stage.end - stage.start > 0.02 ? [TOLD[stage.name]] : [];
  for (const wait of stage.waits || []) {
    const behind = Object.entries(wait.behind || {}).map(([reason, spent]) => `${WAITS[reason] || reason} ${seconds(spent)}`);
    parts.push(`waited ${seconds(wait.seconds)} for ${WAITS[wait.reason] || wait.reason}` + (behind.length ? ` (which lacked ${behind.join(", ")})` : ""));
  }
  if (stage.swapped_tokens) parts.push(`${count(stage.swapped_tokens)} tokens moved to host pages`);
  if (stage.dropped_tokens) parts.push(`${count(stage.dropped_tokens)} tokens given up, to be computed again`);
  if (stage.cached_tokens) parts.push(`${count(stage.cached_tokens)} tokens found computed`);
  if (stage.computed_tokens) parts.push(`${count(stage.computed_tokens)} tokens computed in ${chunks(stage)}`);
  if (stage.steps) parts.push(`${count(stage.steps)} steps, ${stage.mean_rows.toFixed(1)} rows in the mean` + (stage.mixed_steps ? `, ${count(stage.mixed_steps)} with others' prompts` : ""));
  if (stage.grammar_seconds) parts.push(`${seconds(stage.grammar_seconds)} of it for grammars`);
  if (stage.ms) parts.push(`most steps up to ${most(stage.ms)} ms`);
  if (stage.output_tokens) parts.push(stage.output_tokens === 1 ? "1 token out" : `${count(stage.output_tokens)} tokens out`);
  if (stage.num_stages) parts.push(`${stage.num_stages} stages in one: ` + Object.entries(stage.stages).map(([name, spent]) => `${name} ${seconds(spent)}`).join(", "));
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

export function facts(journey) {
  const fact = (name, value) => element("span", {}, element("span", { class: "faint", text: `${name} ` }), element("b", { class: "number", text: value }));
  return element(
    "div",
    { class: "facts" },
    fact("state", journey.state + (journey.status ? ` (${journey.status})` : "")),
    fact("in all", seconds(journey.seconds)),
    fact("first byte", seconds(journey.first_byte_seconds)),
    fact("prompt", `${count(journey.prompt_tokens)} tokens, ${count(journey.cached_tokens)} cached`),
    fact("out", `${count(journey.output_tokens)} tokens`),
    ...(journey.preemptions ? [fact("left its row", `${journey.preemptions} ×`)] : []),
    fact("ended by", journey.finish_reasons.filter(Boolean).join(", ") || "–"),
  );
}
