// The page /docs: every route of /openapi.json with its fields. Text is only ever set as text: nothing of the document is markup.

const MAX_DEPTH = 6; // levels of nested objects that are shown
const find = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "depth") made.style.setProperty("--depth", value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const resolved = (document, schema) =>
  schema && schema.$ref ? document.components.schemas[schema.$ref.split("/").pop()] || {} : schema || {};

// The forms that a value may take; null is left out, since most fields take it.
function forms(document, schema) {
  const whole = resolved(document, schema);
  const inner = whole.anyOf || whole.oneOf;
  return inner ? inner.flatMap((form) => forms(document, form)) : whole.type === "null" ? [] : [whole];
}

function kindOf(document, schema) {
  const names = forms(document, schema).map((form) => {
    if (form.enum) return form.enum.map((value) => JSON.stringify(value)).join(" | ");
    if ("const" in form) return JSON.stringify(form.const);
    if (form.type === "array") return `list of ${kindOf(document, form.items || {})}`;
    return [].concat(form.type || "any").filter((name) => name !== "null").join(" | ");
  });
  return [...new Set(names)].join(" | ") || "any";
}

function limitsOf(document, schema) {
  const words = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<", minItems: "entries ≥", maxItems: "entries ≤" };
  const found = forms(document, schema).flatMap((form) =>
    Object.entries(words).filter(([name]) => form[name]).map(([name, word]) => `${word} ${form[name]}`));
  return [...new Set(found)].join(", ");
}

// Rows of a table for the members of an object, those of nested objects below it. `above`: schemas on the way here, against cycles.
function* rows(document, schema, depth = 0, above = []) {
  for (const form of forms(document, schema)) {
    const inner = form.type === "array" ? forms(document, form.items || {}) : [form];
    for (const object of inner) {
      if (!object.properties || above.includes(object) || depth >= MAX_DEPTH) continue;
      const isNeeded = (name) => (object.required || []).includes(name);
      const members = Object.entries(object.properties);
      for (const [name, member] of members.sort(([one], [other]) => isNeeded(other) - isNeeded(one))) {
        const needed = isNeeded(name);
        yield element("tr", {},
          element("td", { depth }, element("code", { text: name })),
          element("td", { text: kindOf(document, member) }),
          element("td", needed ? { text: "required", class: "needed" } : {}),
          element("td", { text: [limitsOf(document, member), member.description || ""].filter(Boolean).join("; ") }));
        yield* rows(document, member, depth + 1, [...above, object]);
      }
    }
  }
}

function table(document, title, schema) {
  const body = element("tbody", {}, ...rows(document, schema));
  if (!body.children.length) return [element("p", { class: "faint", text: `${title}: ${kindOf(document, schema)}` })];
  return [element("h2", { text: title }), element("div", { class: "sideways" }, element("table", {}, body))];
}

const jsonOf = (part) => part?.content?.["application/json"]?.schema;

function curl(method, path, operation) {
  const address = new URL(path.slice(1), location.href.replace(/docs\/?([?#].*)?$/, ""));
  const lines = [`curl${method === "get" ? "" : ` -X ${method.toUpperCase()}`} ${decodeURI(address.href)}`];
  if (jsonOf(operation.requestBody)) lines.push("-H 'Content-Type: application/json'", "-d '{…}'");
  return lines.join(" \\\n  ");
}

function content(document, method, path, operation) {
  const made = [element("pre", { text: curl(method, path, operation) })];
  const given = (operation.parameters || []).map((one) => element("tr", {},
    element("td", {}, element("code", { text: one.name })), element("td", { text: `${kindOf(document, one.schema)}, in the ${one.in}` }),
    element("td", one.required ? { text: "required", class: "needed" } : {})));
  if (given.length) made.push(element("h2", { text: "Parameters" }), element("table", {}, element("tbody", {}, ...given)));
  if (jsonOf(operation.requestBody)) made.push(...table(document, "Request body", jsonOf(operation.requestBody)));
  const answer = operation.responses?.["200"];
  if (jsonOf(answer)) made.push(...table(document, "Answer", jsonOf(answer)));
  const others = Object.keys(answer?.content || {}).filter((media) => media !== "application/json");
  if (others.length) made.push(element("p", { class: "faint", text: `Also answers with ${others.join(", ")}` }));
  return made;
}

function route(document, method, path, operation) {
  const made = element("details", { class: "card route", id: `${method} ${path}` }, element("summary", {},
    element("span", { class: "method", "data-method": method, text: method.toUpperCase() }), element("code", { text: path }),
    element("span", { class: "faint", text: operation.summary || "" })));
  let isFilled = false;
  made.addEventListener("toggle", () => {
    if (made.open && !isFilled) made.append(...content(document, method, path, operation));
    isFilled ||= made.open;
  });
  const fields = jsonOf(operation.requestBody) ? [...rows(document, jsonOf(operation.requestBody))] : [];
  made.dataset.words = `${method} ${path} ${operation.summary || ""} ${fields.map((row) => row.textContent).join(" ")}`.toLowerCase();
  return made;
}

function filter() {
  const wanted = find("filter").value.trim().toLowerCase().split(/\s+/);
  let shown = 0;
  for (const one of document.querySelectorAll("details.route")) {
    const fits = wanted.every((word) => one.dataset.words.includes(word));
    one.classList.toggle("hidden", !fits);
    shown += fits ? 1 : 0;
  }
  find("note").textContent = `${shown} routes`;
}

async function start() {
  const key = sessionStorage.getItem("octavo-key");
  const response = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!response.ok) throw new Error(`openapi.json: the server answered ${response.status}`);
  const api = await response.json();
  find("version").textContent = `${api.info.title} ${api.info.version}`;
  for (const [path, operations] of Object.entries(api.paths).sort(([one], [other]) => one.localeCompare(other)))
    for (const [method, operation] of Object.entries(operations)) find("routes").append(route(api, method, path, operation));
  find("filter").addEventListener("input", filter);
  filter();
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named) named.open = true;
}

start().catch((error) => {
  find("note").textContent = error.message;
  find("note").className = "bad";
});
