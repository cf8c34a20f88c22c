// Charts of the past, with axes. Pointing at one shows the same moment on all of them, and all its figures.

import { colour, count, element, find, percent, seconds } from "../shared/common.js";
import { prepare } from "./drawing.js";

const LEFT = 46, BOTTOM = 18, TOP = 6, RIGHT = 8; // room for the axes, in pixels
const TICKS = { 300: 60, 3600: 900, 21600: 3600 * 1.5, 86400: 6 * 3600 };

export const KINDS = [
  { id: "rate", title: "Tokens per second", format: (value) => (value === null ? "–" : value < 10 ? value.toFixed(1) : count(value)), second: "promptRate", secondName: "prompt" },
  { id: "ttft", title: "Time to first token", format: seconds },
  { id: "itl", title: "Time between tokens", format: seconds },
  { id: "pages", title: "KV pages in use", format: percent, most: 1 },
];

export class Charts {
  // `onMove` is called when the moment that is pointed at has changed.
  constructor(root, onMove) {
    this.pointed = null; // a time
    this.canvases = new Map();
    for (const { id, title } of KINDS) {
      const canvas = element("canvas", { height: 118, id: `chart-${id}`, role: "img", tabindex: 0, "aria-label": title });
      this.canvases.set(id, canvas);
      root.append(element("div", { class: "card chart" }, element("h2", { text: title }), element("span", { class: "value number", id: `value-${id}`, text: "–" }), canvas));
      canvas.addEventListener("pointermove", (event) => this.point(event, onMove));
      canvas.addEventListener("pointerdown", (event) => this.point(event, onMove));
      for (const kind of ["pointerleave", "blur"]) canvas.addEventListener(kind, () => this.leave(onMove));
      canvas.addEventListener("keydown", (event) => this.keys(event, canvas, onMove));
    }
  }

  point(event, onMove) {
    const box = event.target.getBoundingClientRect(), share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    if (share < 0 || share > 1 || !this.past) return this.leave(onMove);
    this.pointed = this.end - this.past.span * (1 - share);
    this.tell(event.clientX, event.clientY);
    onMove();
  }

  keys(event, canvas, onMove) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.past) return;
    event.preventDefault();
    const wide = Math.max(this.past.interval, this.past.span / 100);
    this.pointed = Math.min(this.end - this.past.interval, Math.max(this.end - this.past.span, (this.pointed ?? this.end - this.past.interval) + step * wide));
    const box = canvas.getBoundingClientRect();
    this.tell(box.left + LEFT + (1 - (this.end - this.pointed) / this.past.span) * (box.width - LEFT - RIGHT), box.top + 20);
    find("chart-note").textContent = find("tip").innerText.replaceAll("\n", ", ");
    onMove();
  }

  leave(onMove) {
    if (this.pointed === null) return;
    this.pointed = null;
    find("tip").classList.add("hidden");
    onMove();
  }

  tell(x, y) {
    const tip = find("tip"), figures = this.nearest();
    tip.classList.toggle("hidden", !figures);
    if (!figures) return;
    const line = (name, value) => element("div", { class: "figure" }, element("span", { text: name }), element("b", { class: "number", text: value }));
    tip.replaceChildren(
      element("div", { class: "moment", text: clockOf(figures.time, this.offset, true) + (figures.seconds > 1 ? ` (${figures.seconds < 60 ? `${figures.seconds} s` : `${Math.round(figures.seconds / 60)} min`})` : "") }),
      line("tokens per second", KINDS[0].format(figures.rate)), line("prompt tokens per second", KINDS[0].format(figures.promptRate)),
      line("time to first token", seconds(figures.ttft)), line("time between tokens", seconds(figures.itl)), line("KV pages in use, at most", percent(figures.pages)),
      line("running, at most", count(figures.rows)), line("waiting, at most", count(figures.waiting)), line("finished", figures.finished >= 0.5 ? count(figures.finished) : "0"),
      ...(figures.preemptions >= 0.5 ? [line("preemptions", count(figures.preemptions))] : []), ...(figures.starts ? [line("engine started", "")] : []),
    );
    delete tip.dataset.place;
    tip.style.left = `${x + 14 + tip.offsetWidth > innerWidth ? Math.max(4, x - tip.offsetWidth - 14) : x + 14}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 8))}px`;
  }

  // The figures of the moment that is pointed at; shortly before the first ones, those.
  nearest() {
    const before = this.series?.findLast((figures) => figures.time <= this.pointed), first = this.series?.[0];
    return before ?? (first && first.time - this.pointed < this.past.span / 50 ? first : null);
  }

  // `offset`: what must be added to the feed's times to get seconds since 1970.
  draw(past, now, offset) {
    Object.assign(this, { past, offset, end: now });
    const width = this.canvases.get("rate").clientWidth - LEFT - RIGHT;
    this.series = past.series(now, width);
    for (const kind of KINDS) this.drawOne(kind, this.canvases.get(kind.id));
  }

  drawOne({ id, format, most, second, title }, canvas) {
    const { context, width, height } = prepare(canvas);
    const values = this.series.flatMap((figures) => [figures[id], second ? figures[second] : null]).filter((value) => value !== null);
    const highest = values.reduce((a, b) => Math.max(a, b), 0);
    const top = most ?? nice(highest, id === "ttft" || id === "itl");
    const x = (time) => LEFT + (1 - (this.end - time) / this.past.span) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
    this.axes(context, width, height, x, y, top, highest || most ? format : null);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT + 1, height);
    context.clip();
    context.strokeStyle = colour("warn");
    context.setLineDash([3, 3]);
    for (const figures of this.series.filter((each) => each.starts && each.time > this.past.since)) {
      context.beginPath();
      context.moveTo(x(figures.time), TOP);
      context.lineTo(x(figures.time), height - BOTTOM);
      context.stroke();
    }
    context.setLineDash([]);
    if (second) line(context, this.series, second, x, y, colour("prompt"), height);
    line(context, this.series, id, x, y, colour("accent"), height);
    const pointed = this.pointed === null ? null : this.nearest();
    if (pointed) {
      context.strokeStyle = colour("faint");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x(pointed.time), TOP);
      context.lineTo(x(pointed.time), height - BOTTOM);
      context.stroke();
      if (pointed[id] !== null) {
        context.fillStyle = colour("accent");
        context.beginPath();
        context.arc(x(pointed.time), y(pointed[id]), 3.2, 0, 2 * Math.PI);
        context.fill();
      }
    }
    context.restore();
    if (!this.series.some((figures) => figures[id])) {
      context.fillStyle = colour("faint");
      context.font = "12px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillText("nothing in this time", (LEFT + width - RIGHT) / 2, (height - BOTTOM) / 2 + 16);
    }
    canvas.setAttribute("aria-label", `${title}: at most ${format(values.length ? highest : null)} in the shown time; the arrow keys show values`);
  }

  axes(context, width, height, x, y, top, format) {
    context.font = "11px ui-monospace, monospace";
    context.lineWidth = 1;
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const place = Math.round(y(top * share)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, place);
      context.lineTo(width - RIGHT, place);
      context.stroke();
      if (format && share) context.fillText(format(top * share).replace(/\.0+(?= |$)/, "").replace(/(\.\d)0 /, "$1 "), LEFT - 6, Math.max(6, place));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const tick = TICKS[this.past.span] ?? this.past.span / 4, zone = new Date().getTimezoneOffset() * 60;
    for (let wall = Math.ceil((this.end + this.offset - this.past.span - zone) / tick) * tick + zone; wall <= this.end + this.offset; wall += tick) {
      const place = x(wall - this.offset);
      if (place > LEFT + 10 && place < width - 18) context.fillText(clockOf(wall, 0), place, height - 4);
    }
  }
}

function line(context, series, name, x, y, paint, height) {
  context.strokeStyle = context.fillStyle = paint;
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  let run = [];
  for (const figures of [...series, { [name]: null }]) {
    if (figures[name] !== null) {
      run.push(figures);
      continue;
    }
    if (run.length) stroke(context, run, name, x, y, height);
    run = [];
  }
}

function stroke(context, run, name, x, y, height) {
  if (run.length === 1) {
    context.beginPath();
    context.arc(x(run[0].time), y(run[0][name]), 1.8, 0, 2 * Math.PI);
    context.fill();
    return;
  }
  context.beginPath();
  context.moveTo(x(run[0].time), y(run[0][name]));
  for (const figures of run) context.lineTo(x(figures.time), y(figures[name]));
  context.stroke();
  context.lineTo(x(run.at(-1).time), height - BOTTOM);
  context.lineTo(x(run[0].time), height - BOTTOM);
  context.globalAlpha = 0.1;
  context.fill();
  context.globalAlpha = 1;
}

// The end of an axis: a round number that holds the highest value.
function nice(highest, isTime) {
  if (!highest) return isTime ? 0.1 : 10;
  const base = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 4, 5, 10].map((factor) => factor * base).find((end) => end >= highest * 1.02) ?? 20 * base;
}

export const clockOf = (time, offset, hasSeconds = false) =>
  new Date((time + offset) * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(hasSeconds ? { second: "2-digit" } : {}) });
