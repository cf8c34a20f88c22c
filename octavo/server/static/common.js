// Shared by both pages: the API key, the theme, server-sent events, number formats.

const root = new URL(".", import.meta.url).pathname.replace(/pages\/$/, ""); // the server's path, with a proxy's prefix

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

// ── the API key: kept by this browser tab only, and sent only to this server ──
const KEY = "octavo-key";
export const key = () => sessionStorage.getItem(KEY) || "";
export const bearer = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

// Whether the server requires a key, even if the browser itself sends it and this page has never seen it.
export const isLocked = async () => (await fetch(url("/version"), { credentials: "omit" })).status === 401;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const response = await fetch(url(path), { ...options, headers: { ...bearer(), ...options.headers } });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an error of our server: perhaps a proxy's page.
  }
  throw new Refused(response.status, message);
}

export function keyDialog(onChange) {
  const field = element("input", { type: "password", id: "key", autocomplete: "off", "aria-label": "API key" });
  const dialog = element(
    "dialog",
    { "aria-label": "API key" },
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
      field,
      " ",
      element("button", { class: "main", text: "Use it" }),
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
    button.textContent = chosen === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", chosen === "dark" ? "Light colours" : "Dark colours");
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
        const name = lines.find((line) => line.startsWith("event: "));
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield { name: name ? name.slice(7) : "", data: data.join("\n") };
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
export const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.01 ? 1 : 0)} %`;
