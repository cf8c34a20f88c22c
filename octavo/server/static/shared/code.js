// A request as code to run elsewhere: curl, or Python with OpenAI's client. The API key is never written, only the name of its
// environment variable.

const OWN = ["top_k", "min_p", "repetition_penalty", "add_generation_prompt", "continue_final_message"]; // fields that OpenAI's client does not have

export function asCurl(base, request, hasKey) {
  const quoted = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const secret = hasKey ? ` \\\n  -H "Authorization: Bearer $OCTAVO_API_KEY"` : "";
  return `curl -N ${base}/chat/completions \\\n  -H "Content-Type: application/json"${secret} \\\n  -d '${quoted}'`;
}

export function asPython(base, request, hasKey) {
  const extra = Object.fromEntries(OWN.filter((name) => name in request).map((name) => [name, request[name]]));
  const plain = Object.fromEntries(Object.entries(request).filter(([name]) => !OWN.includes(name)));
  const lines = Object.entries(plain).map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra, 1)},`);
  const secret = hasKey ? 'os.environ["OCTAVO_API_KEY"]' : '"none"';
  return [
    hasKey ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}", api_key=${secret})`,
    "for chunk in client.chat.completions.create(",
    ...lines,
    "):",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    ...(request.tools ? ["        for call in choice.delta.tool_calls or []:", '            print(call.function.name or "", call.function.arguments or "", end="", flush=True)'] : []),
    "print()",
  ].join("\n");
}

function pythonValue(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList ? value.map((item) => pythonValue(item, depth + 1)) : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${pythonValue(item, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (items.join(", ").length < 70) return `${open}${items.join(", ")}${close}`;
  const pad = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${pad}${item},`).join("\n")}\n${"    ".repeat(depth)}${close}`;
}
