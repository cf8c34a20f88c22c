// Canvases: the map of pages, the batch, sparklines. Each is handed numbers and draws them.
// Knows nothing of the feed.

import { colour } from "./common.js";

const FREE = 0, CACHED = 1, SHARED = 2;

// A canvas's drawing context in CSS pixels, sharp on dense screens.
function prepare(canvas) {
  const width = canvas.clientWidth, height = Number(canvas.getAttribute("height-css") || canvas.getAttribute("height"));
  if (!canvas.hasAttribute("height-css")) canvas.setAttribute("height-css", height);
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function ownerColour(code) {
  const isDark = document.documentElement.dataset.theme === "dark";
  return `hsl(${((code * 137.508) % 360).toFixed(0)} 60% ${isDark ? 62 : 46}%)`;
}

export class PageMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.codes = new Uint16Array(0);
    this.cursor = -1;
    this.columns = 1;
    this.cell = 1;
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    const count = this.codes.length;
    if (!count) return;
    let cell = Math.min(24, Math.sqrt((width * height) / count));
    while (cell > 1 && Math.ceil(count / Math.floor(width / cell)) * cell > height) cell -= 0.05;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width / cell));
    const gap = cell >= 5 ? 1 : cell >= 3 ? 0.5 : 0;
    const fixed = { [FREE]: colour("free"), [CACHED]: colour("cached"), [SHARED]: colour("shared") };
    const known = new Map();
    for (let page = 0; page < count; page++) {
      const code = this.codes[page];
      let fill = fixed[code];
      if (fill === undefined) {
        fill = known.get(code);
        if (fill === undefined) known.set(code, (fill = ownerColour(code)));
      }
      context.fillStyle = fill;
      context.fillRect((page % this.columns) * cell, Math.floor(page / this.columns) * cell, cell - gap, cell - gap);
    }
    if (this.cursor >= 0 && this.cursor < count) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect((this.cursor % this.columns) * cell - 1, Math.floor(this.cursor / this.columns) * cell - 1, cell + 1, cell + 1);
    }
  }

  // The page under a pointer; -1: none.
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const page = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column;
    return column < this.columns && page >= 0 && page < this.codes.length ? page : -1;
  }

  move(key) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[key];
    if (step === undefined) return false;
    this.cursor = Math.max(0, Math.min(this.codes.length - 1, this.cursor < 0 ? 0 : this.cursor + step));
    return true;
  }
}

// Host pages: taken ones first, a colour for each request that was moved there.
export function drawHost(canvas, total, taken) {
  canvas.classList.toggle("hidden", !total);
  if (!total) return;
  const { context, width, height } = prepare(canvas);
  context.fillStyle = colour("free");
  context.fillRect(0, 0, width, height);
  let at = 0;
  for (const [name, pages] of taken) {
    const length = (pages / total) * width;
    context.fillStyle = ownerColour([...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 65521, 7));
    context.fillRect(at, 0, Math.max(1, length - 1), height);
    at += length;
  }
}

// One bar for each row: how far it is on the way to the longest it may become. Prompts are striped.
export function drawBatch(canvas, rows, maxRows) {
  const { context, width, height } = prepare(canvas);
  const places = Math.max(8, Math.min(maxRows, rows.length));
  const pitch = Math.min(22, height / places), thick = Math.max(1, pitch - (pitch > 4 ? 2 : 0));
  const shown = pitch >= 11;
  const left = shown ? 168 : 0, room = width - left - (shown ? 96 : 0);
  context.font = "11px ui-monospace, monospace";
  context.textBaseline = "middle";
  rows.forEach((row, place) => {
    const top = place * pitch;
    context.fillStyle = colour("grid");
    context.fillRect(left, top, room, thick);
    context.fillStyle = ownerColour(row.owner);
    const length = Math.min(1, row.length / Math.max(1, row.maxLen)) * room;
    context.fillRect(left, top, Math.max(2, length), thick);
    if (row.isPrompt) {
      context.fillStyle = colour("prompt");
      context.fillRect(left, top, Math.min(1, row.promptLen / Math.max(1, row.maxLen)) * room, Math.max(1, thick / 3));
    }
    if (!shown) return;
    context.fillStyle = colour("text");
    context.fillText(shorten(row.request + (row.choice ? `#${row.choice}` : ""), 22), 0, top + thick / 2);
    context.fillStyle = row.isPrompt ? colour("prompt") : colour("faint");
    context.fillText(row.isPrompt ? `prompt +${row.stepTokens}` : `decode +${row.stepTokens}`, left + room + 8, top + thick / 2);
  });
  return pitch;
}

export const shorten = (text, length) => (text.length <= length ? text : `${text.slice(0, length - 9)}…${text.slice(-8)}`);

// Points are [time, value]; a value of null is a gap.
export function drawSpark(canvas, points, span, now) {
  const { context, width, height } = prepare(canvas);
  const values = points.map((point) => point[1]).filter((value) => value !== null);
  context.strokeStyle = colour("grid");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  if (!values.length) return;
  const top = Math.max(...values) * 1.1 || 1;
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.beginPath();
  let isDown = false;
  for (const [time, value] of points) {
    if (value === null) {
      isDown = false;
      continue;
    }
    const x = width * (1 - (now - time) / span), y = height - 1 - (value / top) * (height - 4);
    if (isDown) context.lineTo(x, y);
    else context.moveTo(x, y);
    isDown = true;
  }
  context.stroke();
}
