// OpenAI's client for Node, Chat Completions: node chat.mjs URL; prints what it was told.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello." }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const told = {};

async function failure(doing) {
  try {
    await doing();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, param: error.param ?? null, code: error.code ?? null };
  }
}

const ask = (model, more = {}) => client.chat.completions.stream({ model: `anthropic/${model}`, messages, ...more });

const whole = await client.chat.completions.create({ model: "anthropic/text", messages });
told.whole = whole.choices[0].message.content;

const stream = ask("text", { stream_options: { include_usage: true } });
told.deltas = "";
told.reasoning = "";
for await (const chunk of stream) {
  told.deltas += chunk.choices[0]?.delta.content ?? "";
  told.reasoning += chunk.choices[0]?.delta.reasoning_content ?? "";
}
told.text = await stream.finalContent();
told.usage = (await stream.totalUsage()).completion_tokens > 0;

const calling = ask("calls", { tools });
const asked = (await calling.finalMessage()).tool_calls;
told.calls = asked.map((call) => [call.function.name, call.function.arguments]);
const result = { role: "tool", tool_call_id: asked[0].id, content: "rain in Bonn" };
const history = [...messages, { role: "assistant", content: null, tool_calls: asked }, result];
told.answer = (await client.chat.completions.create({ model: "anthropic/calls", messages: history, tools })).choices[0].message.content;

told.cut = await failure(() => ask("cut").finalContent());
told.failing = await failure(() => ask("failing").finalContent());
told.refused = await failure(() => ask("text", { n: 2 }).finalContent());
console.log(JSON.stringify(told));
