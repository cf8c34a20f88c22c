// Tables that are kept up to date row by row, so that a focus, a selection or a click that is under way outlives an update.
// Knows nothing of what the rows say.

import { element } from "./common.js";

// `items` in order; `key` names one; `make` gives its cells once; `update` gets (cells, item) each time.
export function keepRows(body, items, key, make, update) {
  const wanted = new Set(items.map((item) => String(key(item))));
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let at = body.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let row = old.get(name);
    if (row) {
      old.delete(name);
      while (at && at !== row && !wanted.has(at.dataset.key)) at = drop(at);
      if (at !== row) body.insertBefore(row, at);
      else at = at.nextElementSibling;
    } else {
      row = element("tr", { "data-key": name }, ...make(item));
      body.insertBefore(row, at);
    }
    update([...row.children], item);
  }
  for (const row of old.values()) drop(row);
}

function drop(row) {
  const next = row.nextElementSibling, region = row.contains(document.activeElement) && row.closest("[role=region]");
  row.remove();
  if (region) region.focus(); // not lost: the next Tab goes on from here
  return next;
}

// Text only where it differs: an assignment, even of the same, would end a selection.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
