// Tables that are updated row by row, so that an update does not end a focus, a selection or a click in progress.

import { element } from "../shared/common.js";

// `items` in order; `key` identifies an item; `make` creates its cells once; `update` gets (cells, item) each time.
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
  if (region) region.focus(); // the focus is not lost: the next Tab continues from here
  return next;
}

// Set the text only if it differs: any assignment would end a selection.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
