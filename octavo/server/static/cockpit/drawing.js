// Canvases: the map of pages, and the batch. Each draws the numbers that it is given.

import { colour } from "../shared/common.js";

const FREE = 0, CACHED = 1, SHARED = 2, LOADING = 65534, HELD = 65535;
const SMALLEST = 2.5; // pixels of a page's cell; below that one cell shows several pages

// A canvas's drawing context in CSS pixels, sharp on dense screens.
export function prepare(canvas) {
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

// A colour for a request. Neighbouring codes differ; no colour is near the yellow of shared pages.
export function ownerColour(code) {
  const isDark = document.documentElement.dataset.theme === "dark";
  return `hsl(${(75 + ((code * 137.508) % 300)).toFixed(0)} 60% ${isDark ? 62 : 46}%)`;
}

// Base of both maps: places in a grid, selected with the pointer or the arrow keys.
class Grid {
  constructor(canvas) {
    this.canvas = canvas;
    this.cursor = -1; // the place selected with the keyboard
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // Move the cursor by steps[key]. False: the key is not handled here.
  go(key, steps, count) {
    if (!(key in steps) || !count) return false;
    this.cursor = Math.max(0, Math.min(count - 1, this.cursor < 0 ? 0 : this.cursor + steps[key]));
    return true;
  }
}

export class PageMap extends Grid {
  constructor(canvas) {
    super(canvas);
    this.codes = new Uint16Array(0);
    this.highlight = 0; // code of the owner whose pages are highlighted
    this.columns = this.cell = this.per = 1;
  }

  lay(width, height) {
    const count = this.codes.length;
    const room = Math.floor(width / SMALLEST) * Math.floor(height / SMALLEST);
    this.per = Math.max(1, Math.ceil(count / Math.max(1, room)));
    const places = Math.ceil(count / this.per);
    let cell = Math.min(30, Math.sqrt((width * height) / places));
    while (cell > SMALLEST && Math.ceil(places / Math.floor(width / cell)) * cell > height) cell -= 0.05;
    this.cell = Math.max(SMALLEST, cell);
    this.columns = Math.max(1, Math.floor(width / this.cell));
    return places;
  }

  // If a place holds several pages, the code of the busiest: shared, then owned or loading, then held, then cached.
  code(place) {
    if (this.per === 1) return this.codes[place];
    let found = FREE;
    for (let page = place * this.per; page < Math.min(this.codes.length, (place + 1) * this.per); page++) {
      const code = this.codes[page];
      if (code === SHARED) return SHARED;
      if (code === HELD ? found <= CACHED : code > SHARED || (code === CACHED && found === FREE)) found = code;
    }
    return found;
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    if (!this.codes.length) return;
    const places = this.lay(width, height), { cell, columns } = this;
    const gap = cell >= 5 ? 1 : cell >= 3 ? 0.5 : 0;
    const fixed = { [FREE]: colour("free"), [CACHED]: colour("cached"), [SHARED]: colour("shared"), [LOADING]: colour("loading"), [HELD]: colour("held") };
    const known = new Map(), dots = [];
    for (let place = 0; place < places; place++) {
      const code = this.code(place);
      let fill = fixed[code];
      if (fill === undefined) {
        fill = known.get(code);
        if (fill === undefined) known.set(code, (fill = ownerColour(code)));
      }
      context.fillStyle = fill;
      context.globalAlpha = this.highlight && this.highlight !== code ? 0.22 : 1;
      const x = (place % columns) * cell, y = Math.floor(place / columns) * cell;
      context.fillRect(x, y, cell - gap, cell - gap);
      if (code === SHARED && cell >= 7) dots.push([x + (cell - gap) / 2, y + (cell - gap) / 2]);
    }
    context.fillStyle = colour("text");
    context.globalAlpha = this.highlight ? 0.3 : 0.75;
    for (const [x, y] of dots) {
      // A shared page also has a dot, so that colour is not the only difference.
      context.beginPath();
      context.arc(x, y, Math.max(1.2, cell / 9), 0, 2 * Math.PI);
      context.fill();
    }
    context.globalAlpha = 1;
    if (this.cursor >= 0 && this.cursor < places && document.activeElement === this.canvas) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect((this.cursor % columns) * cell - 1, Math.floor(this.cursor / columns) * cell - 1, cell + 1, cell + 1);
    }
  }

  // The first and the last page of a place.
  pages(place) {
    return [place * this.per, Math.min(this.codes.length, (place + 1) * this.per) - 1];
  }

  // The place under the pointer; -1: none.
  at(event) {
    const [x, y] = this.point(event);
    const column = Math.floor(x / this.cell), place = Math.floor(y / this.cell) * this.columns + column;
    return column >= 0 && column < this.columns && place >= 0 && place * this.per < this.codes.length ? place : -1;
  }

  move(key) {
    const places = Math.ceil(this.codes.length / this.per);
    return this.go(key, { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -places, End: places }, places);
  }
}

// Host pages: used ones first, one colour for each swapped-out request.
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

// One bar for each row: its length relative to its maximum length; violet while it computes its prompt. Rows have names while
// there is room for them, otherwise as many columns as needed.
export class Batch extends Grid {
  constructor(canvas) {
    super(canvas);
    this.rows = [];
    this.highlight = 0;
    this.pitch = this.deep = this.columns = this.wide = 1;
  }

  lay(width, height) {
    const count = Math.max(1, this.rows.length);
    for (const [columns, pitches] of [[1, [20, 16, 13, 12]], [2, [16, 13, 12]]]) {
      const pitch = pitches.find((pitch) => count <= columns * Math.floor(height / pitch));
      if (pitch && (columns === 1 || width >= 560)) return this.settle(pitch, columns, width, height, true);
    }
    for (const pitch of [12, 9, 7, 5, 4, 3, 2, 1]) {
      const columns = Math.ceil(count / Math.floor(height / pitch));
      if (width / columns >= (pitch > 4 ? 40 : 14) || pitch === 1) return this.settle(pitch, columns, width, height, false);
    }
  }

  settle(pitch, columns, width, height, hasNames) {
    Object.assign(this, { pitch, columns, deep: Math.floor(height / pitch), wide: width / columns, hasNames });
  }

  draw() {
    const { context, width, height } = prepare(this.canvas);
    this.lay(width, height);
    const { pitch, deep, wide, hasNames } = this;
    const thick = Math.max(1, pitch - (pitch > 4 ? 2 : pitch > 2 ? 1 : 0)), name = hasNames ? Math.min(150, wide * 0.4) : 0, tail = hasNames ? 84 : 0;
    const room = wide - name - tail - (this.columns > 1 ? (hasNames ? 14 : 3) : 0);
    const paint = { grid: colour("grid"), prompt: colour("prompt"), text: colour("text"), faint: colour("faint") };
    context.textBaseline = "middle";
    if (!this.rows.length) {
      context.font = "13px system-ui, sans-serif";
      context.textAlign = "center";
      context.fillStyle = paint.faint;
      context.fillText("No request is being computed. Each one gets a row here.", width / 2, height / 2, width - 8);
      context.textAlign = "left";
    }
    context.font = "11px ui-monospace, monospace";
    this.rows.forEach((row, place) => {
      const left = Math.floor(place / deep) * wide, top = (place % deep) * pitch, bar = left + name;
      context.globalAlpha = this.highlight && this.highlight !== row.owner ? 0.25 : 1;
      context.fillStyle = paint.grid;
      context.fillRect(bar, top, room, thick);
      context.fillStyle = row.isPrompt ? paint.prompt : ownerColour(row.owner);
      context.fillRect(bar, top, Math.max(2, Math.min(1, row.length / Math.max(1, row.maxLen)) * room), thick);
      if (row.isPrompt) {
        context.fillStyle = ownerColour(row.owner);
        context.fillRect(bar, top, Math.max(2, Math.min(5, room / 4)), thick);
      }
      if (hasNames) {
        context.fillStyle = paint.text;
        context.fillText(shorten(row.name, Math.floor(name / 6.8)), left, top + thick / 2);
        context.fillStyle = row.isPrompt ? paint.prompt : paint.faint;
        context.fillText(`${row.isPrompt ? "prompt" : "decode"} +${row.stepTokens}`, bar + room + 6, top + thick / 2);
      }
      if (place === this.cursor && document.activeElement === this.canvas) {
        context.strokeStyle = paint.text;
        context.lineWidth = 2;
        context.strokeRect(left + 1, top, wide - 4, Math.max(3, thick));
      }
    });
    context.globalAlpha = 1;
  }

  at(event) {
    const [x, y] = this.point(event);
    const place = Math.floor(x / this.wide) * this.deep + Math.min(this.deep - 1, Math.floor(y / this.pitch));
    return x >= 0 && y >= 0 && place < this.rows.length ? place : -1;
  }

  move(key) {
    const count = this.rows.length;
    return this.go(key, { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -this.deep, ArrowRight: this.deep, Home: -count, End: count }, count);
  }
}

export const shorten = (text, length) => {
  if (text.length <= length) return text;
  const tail = Math.floor((length - 1) / 3);
  return `${text.slice(0, length - 1 - tail)}…${text.slice(text.length - tail)}`;
};
