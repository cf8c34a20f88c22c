// Talks to the server at BASE with openai's own client and prints what it saw, as JSON.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 120000 });
const ask = (content) => [{ role: "user", content }];
const calm = { model, temperature: 0, max_tokens: 96 };
const seen = {};

const question = { ...calm, messages: ask("Name the capital of Germany.") };
const chat = await client.chat.completions.create(question);
seen.chat = chat.choices[0].message.content;
seen.usage = chat.usage;
seen.stream = "";
for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
  seen.stream += chunk.choices[0]?.delta?.content ?? "";
}

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Get the weather", parameters } }];
const wish = { ...calm, messages: ask("What is the weather in Paris?"), tools, tool_choice: "required", parallel_tool_calls: false };
const called = await client.chat.completions.create(wish);
seen.calls = called.choices[0].message.tool_calls;
seen.finish = called.choices[0].finish_reason;
const runner = client.chat.completions.stream(wish);
seen.streamedCalls = (await runner.finalMessage()).tool_calls.map(({ function: { name, arguments: text } }) => ({ name, arguments: text }));

const schema = {
  type: "object",
  properties: { country: { type: "string", maxLength: 40 }, capital: { type: "string", maxLength: 40 } },
  required: ["country", "capital"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "capital", strict: true, schema } };
const structured = await client.chat.completions.create({ ...calm, messages: ask("Give France and its capital."), response_format: format });
seen.json = structured.choices[0].message.content;

seen.completion = (await client.completions.create({ model, prompt: "The sky is", max_tokens: 4, temperature: 0 })).choices[0].text;
seen.embedding = (await client.embeddings.create({ model, input: "a" })).data[0].embedding.length;
seen.status = await client.chat.completions.create({ ...question, model: "nobody" }).then(() => 200, (error) => error.status);

const input = { model, input: "Say hi", max_output_tokens: 16, temperature: 0 };
seen.response = (await client.responses.create(input)).output_text;
seen.responseEvents = [];
for await (const event of await client.responses.create({ ...input, stream: true })) seen.responseEvents.push(event.type);

console.log(JSON.stringify(seen));
