// The controls of a talk: system prompt, sampling, format, tools. They belong to the talk; a new one begins with the last ones used.
// An empty field means the model's own default, which its placeholder shows.

import { element, find } from "../shared/common.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const FIELDS = ["system", ...NUMBERS, "stop", "format", "schema", "tools", "tool_choice", "logprobs"];
const NEUTRAL = { temperature: "1", top_p: "1", top_k: "all", min_p: "0", repetition_penalty: "1" };
const LAST = "octavo-settings", PRESETS = "octavo-presets";
const MAX_PRESETS = 100;
const SCHEMA = JSON.stringify({ type: "object", properties: { city: { type: "string" }, country: { type: "string" } }, required: ["city", "country"], additionalProperties: false }, null, 2);
const TOOLS = JSON.stringify([{ type: "function", function: { name: "weather", description: "The weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
const BUILT_IN = {
  "Short answers": "Answer in as few words as possible. No introduction, no summary.",
  "Teacher": "Explain step by step, from what a beginner knows. Use one example. End with a question that checks the understanding.",
  "Programmer": "You are an experienced programmer. Answer with working code first, then explain what is not obvious. Say what you are not sure of.",
  "Editor": "Improve the text that you are given: clear, direct, no filler. Keep its meaning and its tone. Answer with the text only.",
  "Translator": "Translate what you are given into English; what is English, into the language that is asked for. Answer with the translation only.",
};

export class Mistake extends Error {}

const readJson = (text, what) => {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Mistake(`${what} is not JSON: ${error.message}`);
  }
};

export class Settings {
  // `onChange` is called with the values whenever a person has changed one.
  constructor(onChange) {
    this.onChange = onChange;
    find("controls").addEventListener("input", (event) => {
      if (event.target.id === "preset") return;
      this.changed();
    });
    find("controls").addEventListener("submit", (event) => event.preventDefault());
    find("format").addEventListener("change", () => {
      if (find("format").value === "json_schema" && !find("schema").value.trim()) find("schema").value = SCHEMA;
      this.changed();
    });
    find("tools-example").addEventListener("click", () => {
      find("tools").value = TOOLS;
      this.changed();
    });
    find("reset").addEventListener("click", () => {
      this.show({});
      this.changed();
    });
    find("preset").addEventListener("change", () => this.usePreset());
    find("preset-save").addEventListener("click", () => this.savePreset());
    find("preset-remove").addEventListener("click", () => this.removePreset());
    this.showPresets();
  }

  // Of the talk that was changed last.
  static last() {
    try {
      return JSON.parse(localStorage.getItem(LAST)) || {};
    } catch {
      return {};
    }
  }

  changed() {
    const values = this.values();
    localStorage.setItem(LAST, JSON.stringify(values));
    this.reveal();
    this.onChange(values);
  }

  values() {
    const found = {};
    for (const name of FIELDS) {
      const field = find(name);
      const value = field.type === "checkbox" ? (field.checked ? "" : "off") : field.value;
      if (value !== "" && !(name === "format" && value === "text") && !(name === "tool_choice" && value === "auto")) found[name] = value;
    }
    return found;
  }

  show(values) {
    for (const name of FIELDS) {
      const field = find(name);
      if (field.type === "checkbox") field.checked = values[name] !== "off";
      else field.value = values[name] ?? (field.tagName === "SELECT" ? field.options[0].value : "");
    }
    this.reveal();
  }

  reveal() {
    find("schema-label").classList.toggle("hidden", find("format").value !== "json_schema");
    const own = find("system").value;
    const named = Object.entries(this.presets()).find(([, text]) => text === own);
    find("preset").value = own ? (named ? named[0] : "*") : "";
    find("preset-remove").classList.toggle("hidden", !named || named[0] in BUILT_IN);
    find("preset-save").classList.toggle("hidden", !own || Boolean(named));
  }

  // A model's own defaults, from its generation_config.json, as placeholders.
  showDefaults(defaults, contextLength) {
    for (const name of NUMBERS) {
      const value = defaults?.[name];
      const neutral = { max_tokens: "until the end", seed: "any" }[name] ?? NEUTRAL[name] ?? "0";
      find(name).placeholder = value === undefined ? neutral : `${value} (model)`;
    }
    find("max_tokens").max = contextLength;
  }

  // ── presets of the system prompt ──
  presets() {
    let own = {};
    try {
      own = JSON.parse(localStorage.getItem(PRESETS)) || {};
    } catch {
      // Not ours, or broken: begin again.
    }
    return { ...BUILT_IN, ...own };
  }

  showPresets() {
    const names = Object.keys(this.presets());
    find("preset").replaceChildren(element("option", { value: "", text: "No system prompt" }), ...names.map((name) => element("option", { value: name, text: name })), element("option", { value: "*", text: "Your own text" }));
    this.reveal();
  }

  usePreset() {
    const name = find("preset").value;
    if (name === "*") return find("system").focus();
    find("system").value = this.presets()[name] ?? "";
    this.changed();
  }

  savePreset() {
    const name = prompt("Name of this preset", "")?.trim().slice(0, 60);
    if (!name) return;
    const own = Object.fromEntries(Object.entries(this.presets()).filter(([key, text]) => BUILT_IN[key] !== text));
    if (Object.keys(own).length >= MAX_PRESETS) return alert(`There are ${MAX_PRESETS} presets already, which is the limit.`);
    localStorage.setItem(PRESETS, JSON.stringify({ ...own, [name]: find("system").value }));
    this.showPresets();
  }

  removePreset() {
    const chosen = find("preset").value;
    const own = Object.fromEntries(Object.entries(this.presets()).filter(([key, text]) => key !== chosen && BUILT_IN[key] !== text));
    localStorage.setItem(PRESETS, JSON.stringify(own));
    this.showPresets();
  }
}

// The request that a talk's settings ask for. Throws Mistake for what a person must change.
export function requestOf(model, settings, messages, isContinued = false) {
  const request = { ...(model ? { model } : {}), messages: [], stream: true, stream_options: { include_usage: true } };
  if (settings.system?.trim()) request.messages.push({ role: "system", content: settings.system.trim() });
  request.messages.push(...messages);
  for (const name of NUMBERS) if (settings[name]) request[name] = Number(settings[name]);
  const stops = (settings.stop || "").split("\n").filter(Boolean);
  if (stops.length) request.stop = stops;
  if (settings.format === "json_object") request.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = readJson(settings.schema || "", "the schema");
    if (!schema) throw new Mistake("the JSON schema is missing");
    request.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  const tools = readJson(settings.tools || "", "the list of tools");
  if (tools) Object.assign(request, { tools, tool_choice: settings.tool_choice || "auto" });
  if (settings.logprobs !== "off") Object.assign(request, { logprobs: true, top_logprobs: 5 });
  if (isContinued) Object.assign(request, { add_generation_prompt: false, continue_final_message: true });
  return request;
}
