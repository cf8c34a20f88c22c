// The numbers of the last five minutes: the history that the server sends first, then what the feed has sent since.

const SPAN_SECONDS = 300;
const RATE_SECONDS = 3; // rates are averages over this time
const POINT_SECONDS = 1;
const NAMES = ["time", "generation_tokens", "first_tokens", "first_token_seconds", "token_gaps", "token_gap_seconds", "preemptions", "used", "waiting"];

const mean = (total, number) => (number > 0 ? total / number : null);

export class Past {
  constructor() {
    this.span = SPAN_SECONDS;
    this.sparks = { ttft: [], itl: [], rate: [], pages: [] };
    this.points = []; // one a second, for the sparks
    this.looks = []; // [time, totals] of the last RATE_SECONDS
  }

  // A feed begins: its history replaces ours. Points before that, of an engine that has ended, stay, followed by a gap.
  begin(state) {
    const first = state.past.length ? state.past[0][0] : state.time;
    this.points = [];
    this.looks = [];
    for (const [name, points] of Object.entries(this.sparks)) {
      const before = points.filter((point) => point[0] < first && point[0] > first - SPAN_SECONDS);
      this.sparks[name] = before.length ? [...before, [first, null]] : [];
    }
    for (const past of state.past) this.point(Object.fromEntries(NAMES.map((name, at) => [name, past[at]])), state.num_pages);
  }

  add(state) {
    this.looks.push([state.time, state.totals]);
    while (this.looks.length > 2 && this.looks[0][0] < state.time - RATE_SECONDS) this.looks.shift();
    this.share = (state.num_pages - state.num_free_pages - state.num_cached_pages) / Math.max(1, state.num_pages);
    const last = this.points[this.points.length - 1];
    if (last && state.time - last.time < POINT_SECONDS) return;
    this.point({ ...state.totals, time: state.time, used: this.share * state.num_pages }, state.num_pages);
  }

  rates() {
    const [before, old] = this.looks[0], [now, fresh] = this.looks[this.looks.length - 1];
    const span = now - before;
    return Object.fromEntries(Object.entries(fresh).map(([name, value]) => [name, span > 0 ? (value - old[name]) / span : 0]));
  }

  // The current value; null: there was nothing to measure in the last seconds.
  now(name) {
    const rate = this.rates();
    const known = { ttft: mean(rate.first_token_seconds, rate.first_tokens), itl: mean(rate.token_gap_seconds, rate.token_gaps), pages: this.share };
    return name === "rate" ? (this.looks.length > 1 ? rate.generation_tokens : null) : known[name];
  }

  point(point, numPages) {
    let at = this.points.length - 1;
    while (at > 0 && this.points[at].time > point.time - RATE_SECONDS) at--;
    const before = this.points[at];
    this.points.push(point);
    const span = before ? point.time - before.time : 0;
    const over = (name) => point[name] - before[name];
    const values = {
      ttft: span > 0 ? mean(over("first_token_seconds"), over("first_tokens")) : null,
      itl: span > 0 ? mean(over("token_gap_seconds"), over("token_gaps")) : null,
      rate: span > 0 ? over("generation_tokens") / span : null,
      pages: point.used / Math.max(1, numPages),
    };
    for (const [name, points] of Object.entries(this.sparks)) {
      points.push([point.time, values[name]]);
      while (points.length && points[0][0] < point.time - SPAN_SECONDS) points.shift();
    }
    while (this.points.length && this.points[0].time < point.time - SPAN_SECONDS) this.points.shift();
  }
}
