// What the server did before: its history, in intervals of a second, ten seconds or a minute, and what the feed has told since.
// An interval without a record is one in which nothing happened.

import { ask } from "../shared/common.js";

const RATE_SECONDS = 3; // current rates are averages over this time
const NAMES = ["time", "steps", "prompt_tokens", "cached_tokens", "generation_tokens", "finished", "preemptions", "busy_seconds", "first_tokens", "first_token_seconds", "token_gaps", "token_gap_seconds", "starts", "used_share", "num_waiting", "num_rows"];
const MAXIMA = new Set(["used_share", "num_waiting", "num_rows"]);
export const SPANS = { "5 min": 300, "1 h": 3600, "6 h": 6 * 3600, "24 h": 24 * 3600 };
const FINEST_SPAN = 600;

const mean = (total, number) => (number > 0 ? total / number : null);

export class Past {
  constructor(span) {
    this.span = span;
    this.interval = 1; // seconds of a record
    this.since = 0; // when the server was there
    this.records = new Map(); // start of an interval → its record
    this.looks = []; // [time, totals] of the last RATE_SECONDS
    this.turn = 0;
  }

  // Load the history of the chosen span.
  async load(span = this.span) {
    const turn = ++this.turn;
    const history = await (await ask(`/v1/live/history?seconds=${span}`)).json();
    if (turn !== this.turn) return;
    Object.assign(this, { span, interval: history.interval, since: history.since, loadedAt: history.time });
    this.records.clear();
    for (const point of history.points) this.keep(point);
  }

  keep(point) {
    const record = Object.fromEntries(NAMES.map((name, at) => [name, point[at]]));
    this.records.set(record.time, record);
  }

  // A feed begins, perhaps of another engine, whose totals start at 0.
  begin() {
    this.looks = [];
  }

  add(state) {
    this.looks.push([state.time, state.totals]);
    while (this.looks.length > 2 && this.looks[0][0] < state.time - RATE_SECONDS) this.looks.shift();
    this.share = (state.num_pages - state.num_free_pages - state.num_cached_pages) / Math.max(1, state.num_pages);
    if (this.span <= FINEST_SPAN) for (const point of state.recent) this.keep(point);
    for (const time of this.records.keys()) {
      if (time >= state.time - this.span - this.interval) break; // in order of time, but for those that the feed repeats
      this.records.delete(time);
    }
  }

  // Whether the longer spans, which the feed does not continue, are behind by an interval.
  isStale(now) {
    return this.span > FINEST_SPAN && this.loadedAt !== undefined && now - this.loadedAt > this.interval;
  }

  rates() {
    const [before, old] = this.looks[0], [now, fresh] = this.looks.at(-1);
    const span = now - before;
    return Object.fromEntries(Object.entries(fresh).map(([name, value]) => [name, span > 0 ? Math.max(0, value - old[name]) / span : 0]));
  }

  // The current value; null: there was nothing to measure in the last seconds.
  now(name) {
    const rate = this.rates();
    const known = { ttft: mean(rate.first_token_seconds, rate.first_tokens), itl: mean(rate.token_gap_seconds, rate.token_gaps), pages: this.share };
    return name === "rate" ? (this.looks.length > 1 ? rate.generation_tokens : null) : known[name];
  }

  // The figures of the interval at a time; null: before the server was there.
  at(time) {
    const start = Math.floor(time / this.interval) * this.interval;
    if (start + this.interval < this.since) return null;
    return figures(this.records.get(start), start, this.interval);
  }

  // One entry for each interval of the span, oldest first; `width`: at most so many, so that each has a pixel.
  series(now, width) {
    const per = Math.max(1, Math.ceil(this.span / this.interval / Math.max(1, width)));
    const step = per * this.interval, found = [];
    const first = Math.max(Math.floor((now - this.span) / step), Math.floor(this.since / step)) * step;
    // The interval that is still running would look like a drop.
    for (let start = first; start + step <= now; start += step) {
      if (per === 1) found.push(figures(this.records.get(start), start, step));
      else found.push(figures(this.joined(start, per), start, step));
    }
    return found;
  }

  joined(start, per) {
    const sum = {};
    for (let part = 0; part < per; part++) {
      for (const [name, value] of Object.entries(this.records.get(start + part * this.interval) ?? {})) {
        sum[name] = MAXIMA.has(name) ? Math.max(sum[name] ?? 0, value) : (sum[name] ?? 0) + value;
      }
    }
    return sum;
  }
}

function figures(record = {}, start, seconds) {
  return {
    time: start,
    seconds,
    rate: (record.generation_tokens ?? 0) / seconds,
    promptRate: (record.prompt_tokens ?? 0) / seconds,
    ttft: mean(record.first_token_seconds, record.first_tokens),
    itl: mean(record.token_gap_seconds, record.token_gaps),
    pages: record.used_share ?? 0,
    rows: record.num_rows ?? 0,
    waiting: record.num_waiting ?? 0,
    finished: record.finished ?? 0,
    preemptions: record.preemptions ?? 0,
    starts: record.starts ?? 0,
  };
}
