// Describes the page or row under the pointer or the keyboard's cursor, and shows a request's journey in a dialog.

import { ask, count, element, find } from "../shared/common.js";
import { facts, waterfall } from "../shared/waterfall.js";
import { write } from "./rows.js";

const KINDS = ["free", "cached: not in use, kept for prompts with the same prefix", "shared"];
const FIRST_OWNER = 3, LOADING = 65534, HELD = 65535;
const KEPT = {
  [LOADING]: "loading: being filled from --kv-tier",
  [HELD]: "held: cached, and kept for a conversation that may go on, or pinned",
};
const MAX_NAMED = 12;

// ── journeys ──
export const journeyButton = (id, text = id) =>
  element("button", { type: "button", class: "plain", text, title: id, "aria-label": `journey of ${text}`, onclick: () => openJourney(id) });

let shown = 0;
export async function openJourney(id) {
  const turn = ++shown, dialog = find("journey");
  write(find("journey-id"), id);
  find("journey-body").replaceChildren(element("p", { class: "faint", text: "…" }));
  if (!dialog.open) dialog.showModal();
  // The journey of a running request is updated while the dialog is open.
  while (turn === shown && dialog.open) {
    try {
      const journey = await (await ask(`/v1/requests/${encodeURIComponent(id)}`)).json();
      if (turn !== shown) return;
      find("journey-body").replaceChildren(facts(journey), waterfall(journey));
      for (const text of [journey.error, journey.note]) if (text) find("journey-body").append(element("p", { class: "faint", text }));
      if (!["waiting", "running"].includes(journey.state)) return;
    } catch (error) {
      find("journey-body").replaceChildren(element("p", { text: error.message }));
      return;
    }
    await new Promise((resume) => setTimeout(resume, 500));
  }
}

// ── the maps ──
export function touch({ map, batch, rows, redraw }) {
  const ownerOf = (place) => rows().find((row) => row.owner === map.code(place));

  function describePlace(place) {
    const [first, last] = map.pages(place), code = map.code(place);
    const name = first === last ? `page ${first}` : `pages ${first} to ${last}`;
    if (code < FIRST_OWNER) return `${name}: ${KINDS[code]}`;
    if (KEPT[code]) return `${name}: ${KEPT[code]}`;
    const owner = ownerOf(place);
    return `${name}: ` + (owner ? `used by ${owner.name}` : "used by one request");
  }

  const describeRow = ({ row, name, isPrompt, stepTokens, length, promptLen, maxLen, pages }) =>
    `row ${row}: ${name}, ${isPrompt ? "computes its prompt" : "decodes"}, ${stepTokens} tokens in this step, ${count(length)} of at most ${count(maxLen)} tokens (prompt ${count(promptLen)}), ${count(pages)} pages`;

  let asked = 0;
  async function namePlace(place, show) {
    show(describePlace(place));
    if (map.per > 1 || map.code(place) < FIRST_OWNER - 1 || KEPT[map.code(place)]) return;
    const turn = ++asked, page = map.pages(place)[0];
    await new Promise((resume) => setTimeout(resume, 120)); // no request for a pointer that only passes
    if (turn !== asked) return;
    try {
      const { owners } = await (await ask(`/v1/live/pages/${page}`)).json();
      const more = owners.length > MAX_NAMED ? ` and ${owners.length - MAX_NAMED} more` : "";
      if (turn === asked && owners.length) show(`page ${page}: ${owners.length > 1 ? `shared by ${owners.length}:` : "used by"} ${owners.slice(0, MAX_NAMED).join(", ")}${more}`);
    } catch {
      // The description from the map has been shown already.
    }
  }

  function highlight(code) {
    if (map.highlight === code) return;
    map.highlight = batch.highlight = code;
    redraw();
  }

  function hover(grid, canvas, show) {
    const tip = find("tip");
    const leave = () => {
      asked++;
      tip.classList.add("hidden");
      delete tip.dataset.place;
      highlight(0);
    };
    canvas.addEventListener("pointermove", (event) => {
      const place = grid.at(event);
      if (place < 0) return leave();
      tip.classList.remove("hidden");
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - Math.min(430, tip.offsetWidth + 20))}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
      if (tip.dataset.place === String(place)) return;
      tip.dataset.place = place;
      show(place, (text) => write(tip, text));
    });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("blur", leave);
  }

  function keys(grid, canvas, show, open) {
    canvas.addEventListener("keydown", (event) => {
      if (grid.move(event.key)) {
        event.preventDefault();
        show(grid.cursor);
        redraw();
      } else if (event.key === "Enter" && grid.cursor >= 0) {
        event.preventDefault(); // otherwise Enter presses the button that gets the focus next: the dialog's Close
        open(grid.cursor);
      }
    });
    canvas.addEventListener("focus", () => {
      if (grid.cursor < 0 && grid.move("Home")) show(grid.cursor);
      redraw();
    });
    canvas.addEventListener("click", (event) => {
      const place = grid.at(event);
      if (place >= 0) open(place);
    });
  }

  const openPlace = (place) => {
    const owner = ownerOf(place);
    if (owner) openJourney(owner.request);
  };
  const openRow = (place) => rows()[place] && openJourney(rows()[place].request);
  const mark = (code) => highlight(code >= FIRST_OWNER && !KEPT[code] ? code : 0);
  hover(map, map.canvas, (place, show) => {
    mark(map.code(place));
    namePlace(place, show);
  });
  hover(batch, batch.canvas, (place, show) => {
    mark(rows()[place].owner);
    show(describeRow(rows()[place]));
  });
  keys(map, map.canvas, (place) => {
    mark(map.code(place));
    namePlace(place, (text) => write(find("page-note"), text));
  }, openPlace);
  keys(batch, batch.canvas, (place) => {
    mark(rows()[place].owner);
    write(find("row-note"), describeRow(rows()[place]));
  }, openRow);
}
