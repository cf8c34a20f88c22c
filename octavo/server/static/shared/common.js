// Shared by all pages: elements, the API key, the theme, server-sent events, number formats.

import { icon } from "./icons.js";

const root = new URL("../..", import.meta.url).pathname; // the server's path, with a proxy's prefix

export const url = (path) => root + path.replace(/^\//, "");
export const find = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "style") made.style.cssText = value; // the content policy refuses a style attribute
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A button with a sign instead of words; `name` is its name for screen readers and its tooltip.
export const iconButton = (sign, name, onclick, attributes = {}) =>
  element("button", { type: "button", class: "icon", "aria-label": name, title: name, onclick, ...attributes }, icon(sign));

// Fill the buttons of a page's HTML that name their sign.
export function fillIcons() {
  for (const button of document.querySelectorAll("[data-icon]")) {
    button.prepend(icon(button.dataset.icon));
    if (button.ariaLabel) button.title ||= button.ariaLabel;
  }
}

// Copies `read()` and says so.
export function copyButton(name, read, attributes = {}) {
  const button = iconButton("copy", name, async () => {
    const isCopied = await copyText(read());
    button.replaceChildren(icon(isCopied ? "done" : "cross"));
    button.title = isCopied ? "Copied" : "The browser did not allow it";
    button.dataset.copied = isCopied ? "yes" : "no";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = name;
      delete button.dataset.copied;
    }, 1400);
  }, attributes);
  return button;
}

// To the clipboard, also on pages without TLS, where browsers hide navigator.clipboard.
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // No permission: the older way may still work.
    }
  }
  const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  (document.querySelector("dialog[open]") || document.body).append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

// Offer a text as a file.
export function saveFile(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// ── the API key: kept by this browser tab only, and sent only to this server ──
const KEY = "octavo-key";
export const key = () => sessionStorage.getItem(KEY) || "";
export const bearer = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

// Whether the server requires a key, even if the browser itself sends it and this page has never seen it.
export const isLocked = async () => (await fetch(url("/version"), { credentials: "omit" })).status === 401;

export class Refused extends Error {
  constructor(status, message, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }
}

export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(url(path), { ...options, headers: { ...bearer(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached"); // the browser says "Failed to fetch", and no more
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`, param = null;
  try {
    ({ message, param } = (await response.json()).error);
  } catch {
    // Not an error of our server: perhaps a proxy's page.
  }
  throw new Refused(response.status, message, param);
}

export function keyDialog(onChange) {
  const field = element("input", { type: "password", id: "key", autocomplete: "off", "aria-label": "API key" });
  const dialog = element(
    "dialog",
    { class: "small", "aria-label": "API key" },
    element("h2", { text: "API key" }),
    element("p", { text: "This server requires an API key. It is kept until you close this tab." }),
    element(
      "form",
      {
        method: "dialog",
        onsubmit: () => {
          sessionStorage.setItem(KEY, field.value.trim());
          onChange();
        },
      },
      element("div", { class: "line-of-fields" }, field, element("button", { class: "main", text: "Use it" })),
    ),
  );
  document.body.append(dialog);
  return () => {
    if (!dialog.open) dialog.showModal();
  };
}

// ── theme: the system's until the user chooses one ──
export function theme(button, onChange = () => {}) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const chosen = localStorage.getItem("octavo-theme") || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = chosen;
    button.replaceChildren(icon(chosen === "dark" ? "sun" : "moon"));
    button.title = chosen === "dark" ? "Light colours" : "Dark colours";
    button.setAttribute("aria-label", button.title);
    onChange();
  };
  button.addEventListener("click", () => {
    localStorage.setItem("octavo-theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    show();
  });
  dark.addEventListener("change", show);
  show();
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ── server-sent events by fetch: an EventSource cannot send a key ──
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const lines = rest.slice(0, end).split("\n");
        rest = rest.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        const id = lines.find((line) => line.startsWith("id: "));
        const queue = lines.find((line) => line.startsWith(": queue "));
        if (data.length || queue) yield { data: data.join("\n"), id: id ? Number(id.slice(4)) : null, queue };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ── number formats ──
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const count = (value) => Math.round(value).toLocaleString("en");
export const percent = (value) => (value === null ? "–" : `${(value * 100).toFixed(value > 0 && value < 0.01 ? 1 : 0)} %`);
export const many = (number, one, several = `${one}s`) => `${count(number)} ${number === 1 ? one : several}`;
