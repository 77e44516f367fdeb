// Calls of the npm clients: openai, the AI SDK and LangChain JS. Prints one line of JSON for each.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { embed, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const to = { baseURL: `${process.env.TANDEM_URL}/v1`, apiKey: "none" };
const say = (line) => console.log("CALL " + JSON.stringify(line));
for (const name of ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@langchain/openai"])
  say({ package: name, version: JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version });
async function call(name, what) {
  try {
    await what();
    say({ call: name, works: true });
  } catch (error) {
    say({ call: name, works: false, whose: "ours", reason: `${error.name}: ${error.message}`.slice(0, 300) });
  }
}
const must = (fits, what) => {
  if (!fits) throw new Error(`not as expected: ${JSON.stringify(what)}`);
};
const messages = [{ role: "user", content: "Tell me a story." }];
const client = new OpenAI({ ...to, maxRetries: 0 });
await call("openai, stream", async () => {
  let text = "";
  const stream = await client.chat.completions.create({ model: "demo", messages, max_tokens: 16, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  must(text, text);
});
await call("openai, responses stream", async () => {
  let last;
  for await (last of await client.responses.create({ model: "demo", input: "Hi", max_output_tokens: 16, stream: true }));
  must(["response.completed", "response.incomplete"].includes(last.type), last);
});
await call("openai, embeddings", async () => {
  const made = await client.embeddings.create({ model: "demo", input: "a" });
  must(made.data[0].embedding.length > 1, made);
});
const schema = z.object({ sky: z.enum(["rain", "sun"]) });
const tools = { report: tool({ description: "Reports.", inputSchema: schema, execute: async () => "done" }) };
const compatible = createOpenAICompatible({ name: "tandem", supportsStructuredOutputs: true, ...to });
const official = createOpenAI(to);
const models = { compatible: compatible("demo"), chat: official.chat("demo"), responses: official.responses("demo") };
for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt: "How is the weather?", maxOutputTokens: 64, maxRetries: 0 };
  await call(`ai, ${name}: generateText`, async () => must((await generateText(asked)).text, name));
  await call(`ai, ${name}: streamText`, async () => must(await streamText(asked).text, name));
  await call(`ai, ${name}: tools`, async () => {
    const said = await generateText({ ...asked, tools, toolChoice: "required", stopWhen: stepCountIs(2) });
    must(said.steps.length === 2, said.steps.length);
  });
  await call(`ai, ${name}: generateObject`, async () => {
    must((await generateObject({ ...asked, schema })).object.sky, name);
  });
}
await call("ai, compatible: embed", async () => {
  must((await embed({ model: compatible.textEmbeddingModel("demo"), value: "a" })).embedding.length > 1, "embedding");
});
const chat = new ChatOpenAI({ model: "demo", apiKey: "none", configuration: to, maxTokens: 64, maxRetries: 0 });
await call("langchain, invoke", async () => must((await chat.invoke("Hello")).content, "text"));
await call("langchain, stream", async () => {
  for await (const chunk of await chat.stream("Hello")) must(chunk, chunk);
});
await call("langchain, structured", async () => {
  must((await chat.withStructuredOutput(schema, { method: "jsonSchema", strict: true }).invoke("Weather?")).sky, "sky");
});
