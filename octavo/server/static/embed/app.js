// The page of a model that gives embeddings and no text: compares texts by their vectors.

import { ask, colour, copyButton, count, element, fillIcons, find, iconButton, isLocked, keyDialog, many, theme, url } from "../shared/common.js";

const MAX_TEXTS = 50;
const EXAMPLE = ["How do I reset my password?", "I cannot log in to my account.", "The parcel has not arrived.", "When does the shop open on Sundays?"];
const EXAMPLE_QUERY = "I forgot my login details";
const KEPT = "octavo-embed";

let model = null, needsKey = false, vectors = [], shownTexts = [];
const showKey = keyDialog(load);
const status = (text) => (find("status").textContent = text);

async function load() {
  try {
    model = (await (await ask("/v1/models")).json()).data[0];
    find("model").textContent = model.id;
    find("about").textContent = `${model.id} turns texts of up to ${count(model.max_model_len)} tokens into vectors. Texts of a similar meaning get vectors in a similar direction.`;
    needsKey = await isLocked();
    status("ready");
  } catch (error) {
    status(error.message);
    if (error.status === 401) showKey();
    else setTimeout(load, 2000);
  }
}

// ── the texts ──
const fields = () => [...find("texts").querySelectorAll("textarea")];

function addText(text = "", isFocused = false) {
  if (fields().length >= MAX_TEXTS) return;
  const field = element("textarea", { rows: 1, "aria-label": `Text ${fields().length + 1}` });
  field.value = text;
  const item = element("li", {}, element("div", {}, field, iconButton("cross", "Remove this text", () => {
    item.remove();
    if (!fields().length) addText();
    keep();
  })));
  find("texts").append(item);
  find("add").disabled = fields().length >= MAX_TEXTS;
  if (isFocused) field.focus();
}

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify({ query: find("query").value, texts: fields().map((field) => field.value) }));
}

function fill({ query, texts }) {
  find("query").value = query;
  find("texts").replaceChildren();
  for (const text of texts) addText(text);
  keep();
}

// ── asking ──
async function compare() {
  const query = find("query").value.trim(), texts = fields().map((field) => field.value.trim()).filter(Boolean);
  const all = query ? [query, ...texts] : texts;
  problem("");
  if (all.length < 2) return problem("Two texts are needed, or one and a text to compare it with.");
  const body = { model: model?.id, input: all };
  find("send").disabled = true;
  status("computing");
  const began = performance.now();
  try {
    const answer = await (await ask("/v1/embeddings", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();
    vectors = answer.data.map((item) => item.embedding);
    shownTexts = all;
    status(`${many(all.length, "vector")} of ${count(vectors[0].length)} numbers, ${many(answer.usage.prompt_tokens, "token")}, ${Math.round(performance.now() - began)} ms`);
    show(query !== "", body);
  } catch (error) {
    status("failed");
    problem(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`);
    if (error.status === 401) showKey();
  } finally {
    find("send").disabled = false;
  }
}

function problem(text) {
  find("problem").textContent = text;
  find("problem").classList.toggle("hidden", !text);
}

export function cosine(one, other) {
  let product = 0, first = 0, second = 0;
  for (let at = 0; at < one.length; at++) {
    product += one[at] * other[at];
    first += one[at] ** 2;
    second += other[at] ** 2;
  }
  return first && second ? product / Math.sqrt(first * second) : 0;
}

// ── showing ──
function show(hasQuery, body) {
  find("result").classList.remove("hidden");
  find("ranking-card").classList.toggle("hidden", !hasQuery);
  if (hasQuery) {
    const ranked = shownTexts.slice(1).map((text, at) => [cosine(vectors[0], vectors[at + 1]), text]).sort((a, b) => b[0] - a[0]);
    find("ranking").replaceChildren(...ranked.map(([near, text]) => element("li", {}, element("div", { class: "entry" },
      element("span", { class: "words", text, title: text }), element("div", { class: "track" }, element("i", { style: `width:${(100 * Math.max(0, near)).toFixed(1)}%` })), element("span", { class: "number", text: near.toFixed(3) })))));
  }
  const name = (at) => (hasQuery && at === 0 ? "compared with" : `${at + (hasQuery ? 0 : 1)}`);
  find("matrix").replaceChildren(
    element("thead", {}, element("tr", {}, element("th"), ...shownTexts.map((text, at) => element("th", { scope: "col", text: name(at), title: text })))),
    element("tbody", {}, ...shownTexts.map((text, row) => element("tr", {}, element("th", { scope: "row", text: `${name(row)} · ${text}`, title: text }), ...vectors.map((other) => {
      const near = cosine(vectors[row], other);
      return element("td", { class: "number", text: near.toFixed(2), style: `background:color-mix(in srgb, var(--accent) ${Math.round(72 * Math.max(0, near) ** 2)}%, var(--card))${near > 0.86 ? ";color:var(--accent-text)" : ""}` });
    })))),
  );
  find("vectors").replaceChildren(...shownTexts.map((text) => element("div", { class: "vector" }, element("span", { text, title: text }), element("canvas", { height: 30, role: "img", "aria-label": `the numbers of: ${text}` }))));
  drawVectors();
  find("code").textContent = asCurl(body);
}

// A vector as a band: a column for each number, up for positive ones, down for negative ones.
function drawVectors() {
  const most = Math.max(1e-9, ...vectors.map((vector) => vector.reduce((top, number) => Math.max(top, Math.abs(number)), 0)));
  [...find("vectors").querySelectorAll("canvas")].forEach((canvas, at) => {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = 30, vector = vectors[at], step = width / vector.length;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    vector.forEach((number, place) => {
      context.fillStyle = colour(number >= 0 ? "accent" : "warn");
      const size = (Math.abs(number) / most) * (height / 2 - 1);
      context.fillRect(place * step, number >= 0 ? height / 2 - size : height / 2, Math.max(0.6, step - (step > 4 ? 1 : 0)), size);
    });
  });
}

function asCurl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const secret = needsKey ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  return `curl ${new URL(url("/v1"), location.href).href}/embeddings \\\n  -H "Content-Type: application/json"${secret} \\\n  -d '${quoted}'`;
}

// ── wiring ──
fillIcons();
theme(find("theme"), () => vectors.length && drawVectors());
addEventListener("resize", () => vectors.length && drawVectors());
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  compare();
});
find("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    compare();
  }
});
find("ask").addEventListener("input", keep);
find("add").addEventListener("click", () => addText("", true));
find("example").addEventListener("click", () => fill({ query: EXAMPLE_QUERY, texts: EXAMPLE }));
find("vector-bar").append(copyButton("Copy the vectors as JSON", () => JSON.stringify(vectors)));
find("code-bar").append(copyButton("Copy the request", () => find("code").textContent));
try {
  fill(JSON.parse(sessionStorage.getItem(KEPT)));
} catch {
  fill({ query: "", texts: ["", ""] });
}
find("query").focus();
await load();
document.body.dataset.ready = "yes";
