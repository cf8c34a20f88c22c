// Markdown to a tree of blocks, as plain objects. Nothing here touches the page: render.js makes nodes of the tree.
//
// It is the Markdown that models write: headings, paragraphs, fenced code, lists, tables, quotes, rules, display maths. HTML is text.
// Time grows with the length of the text: every nesting has a limit, and no pattern looks back.

const MAX_DEPTH = 12; // quotes and lists inside each other; deeper ones are text
const MAX_COLUMNS = 64;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const DELIMITER = /^[ \t]*:?-+:?[ \t]*$/;
const TASK = /^\[([ xX])\][ \t]+/;

export function parseBlocks(text) {
  return blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

// Each block has `first` and `last`, its lines, so that a renderer can tell which blocks a longer text has left alone.
function blocksOf(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const first = at;
    const [block, next] = fence(lines, at) || maths(lines, at) || heading(lines, at) || rule(lines, at) || quote(lines, at, depth) || list(lines, at, depth) || table(lines, at) || paragraph(lines, at, depth);
    found.push({ ...block, first, last: next });
    at = next;
  }
  return found;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [mark, indent] = [open[1], lines[at].search(/[`~]/)];
  const inside = [];
  for (let line = at + 1; line < lines.length; line++) {
    const trimmed = lines[line].trim();
    const isEnd = trimmed.length >= mark.length && trimmed[0] === mark[0] && trimmed === mark[0].repeat(trimmed.length);
    if (isEnd) return [{ type: "code", language: open[2], text: inside.join("\n"), isClosed: true }, line + 1];
    inside.push(lines[line].slice(Math.min(indent, lines[line].search(/\S|$/))));
  }
  return [{ type: "code", language: open[2], text: inside.join("\n"), isClosed: false }, lines.length];
}

const MATHS = [["$$", "$$"], ["\\[", "\\]"]];

function maths(lines, at) {
  const start = lines[at].trim();
  const pair = MATHS.find(([open]) => start.startsWith(open));
  if (!pair) return null;
  const [open, close] = pair;
  const end = start.indexOf(close, open.length);
  if (end >= 0) return end + close.length === start.length && end > open.length ? [{ type: "maths", text: start.slice(open.length, end).trim() }, at + 1] : null;
  const inside = [start.slice(open.length)];
  for (let line = at + 1; line < lines.length && lines[line].trim(); line++) {
    const place = lines[line].indexOf(close);
    if (place < 0) {
      inside.push(lines[line]);
      continue;
    }
    if (lines[line].slice(place + close.length).trim()) return null;
    inside.push(lines[line].slice(0, place));
    return [{ type: "maths", text: inside.join("\n").trim() }, line + 1];
  }
  return null;
}

function heading(lines, at) {
  const mark = HEADING.exec(lines[at]);
  if (!mark) return null;
  let text = lines[at].slice(mark[0].length).trim();
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end--;
  if (end === 0 || text[end - 1] === " ") text = text.slice(0, end).trim(); // a closing run of # is no text
  return [{ type: "heading", level: mark[1].length, text }, at + 1];
}

const rule = (lines, at) => (RULE.test(lines[at]) ? [{ type: "rule" }, at + 1] : null);

function quote(lines, at, depth) {
  if (depth >= MAX_DEPTH || !QUOTE.test(lines[at])) return null;
  const inside = [];
  while (at < lines.length && (QUOTE.test(lines[at]) || (lines[at].trim() && !opens(lines, at)))) inside.push(lines[at++].replace(QUOTE, ""));
  return [{ type: "quote", blocks: blocksOf(inside, depth + 1) }, at];
}

// Whether a line begins a block that ends a paragraph.
const opens = (lines, at) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at]) || MARKER.test(lines[at]) || maths(lines, at) !== null;

const indentOf = (line) => line.search(/\S|$/);

function list(lines, at, depth) {
  const first = depth < MAX_DEPTH && MARKER.exec(lines[at]);
  if (!first || first[1].length > 3) return null;
  const kind = /\d/.test(first[2]) ? "number" : first[2];
  const items = [];
  let isLoose = false;
  while (at < lines.length) {
    const mark = MARKER.exec(lines[at]);
    if (!mark || mark[1].length > 3 || RULE.test(lines[at]) || (/\d/.test(mark[2]) ? "number" : mark[2]) !== kind) break;
    const rest = lines[at].slice(mark[0].length);
    const gap = Math.min(indentOf(rest), 4);
    const inner = Math.min(mark[0].length + Math.max(1, gap), mark[1].length + 2); // models indent by two, whatever the marker's width
    const inside = [rest.slice(gap)];
    let line = at + 1;
    for (let wasBlank = false; line < lines.length; line++) {
      const isBlank = !lines[line].trim();
      if (!isBlank && indentOf(lines[line]) < inner && (wasBlank || opens(lines, line))) break;
      inside.push(isBlank ? "" : lines[line].slice(Math.min(indentOf(lines[line]), mark[0].length + Math.max(1, gap))));
      wasBlank = isBlank;
    }
    while (inside.length > 1 && !inside.at(-1)) inside.pop();
    isLoose ||= inside.includes("") && items.length + inside.length > 1;
    const task = TASK.exec(inside[0]);
    if (task) inside[0] = inside[0].slice(task[0].length);
    items.push({ blocks: blocksOf(inside, depth + 1), isChecked: task ? task[1] !== " " : null });
    at = line;
  }
  return [{ type: "list", isOrdered: kind === "number", start: kind === "number" ? parseInt(first[2], 10) : 1, isLoose, items }, at];
}

// The cells of a row: split at pipes that are neither escaped nor inside a code span.
function cells(line) {
  const found = [""];
  let inCode = false;
  for (let at = 0; at < line.length; at++) {
    const letter = line[at];
    if (letter === "\\" && line[at + 1] === "|") {
      found[found.length - 1] += "|";
      at++;
    } else if (letter === "|" && !inCode) found.push("");
    else {
      if (letter === "`") inCode = !inCode;
      found[found.length - 1] += letter;
    }
  }
  const trimmed = found.map((cell) => cell.trim());
  if (!trimmed[0]) trimmed.shift();
  if (trimmed.length && !trimmed.at(-1)) trimmed.pop();
  return trimmed.slice(0, MAX_COLUMNS);
}

function table(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !/^[\s|:-]+$/.test(lines[at + 1]) || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]), marks = cells(lines[at + 1]);
  if (!head.length || head.length !== marks.length || !marks.every((mark) => DELIMITER.test(mark))) return null;
  const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let line = at + 2;
  for (; line < lines.length && lines[line].includes("|"); line++) {
    const row = cells(lines[line]);
    rows.push(head.map((_, column) => row[column] ?? ""));
  }
  return [{ type: "table", head, aligns, rows }, line];
}

function paragraph(lines, at, depth) {
  const inside = [lines[at++].trimStart()];
  while (at < lines.length && lines[at].trim() && (depth >= MAX_DEPTH || !opens(lines, at)) && !table(lines, at)) inside.push(lines[at++].trimStart());
  return [{ type: "paragraph", text: inside.join("\n") }, at];
}
