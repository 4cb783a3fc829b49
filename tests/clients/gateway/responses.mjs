// OpenAI's own client and the AI SDK's provider of the Responses API: node responses.mjs BASE; prints what each was told.
import { createOpenAI } from "@ai-sdk/openai";
import { jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const baseURL = `${process.argv[2]}/v1`;
const client = new OpenAI({ baseURL, apiKey: "k", maxRetries: 0 });
const name = (model) => `anthropic/${model}`;
const place = { type: "function", name: "place", parameters: { type: "object" }, strict: false };

const failed = async (promise) => {
  try {
    await promise;
  } catch (error) {
    return { status: error.status, param: error.param, code: error.code };
  }
};

const events = async (stream) => {
  const all = [];
  for await (const event of stream) all.push(event);
  return all;
};

const helper = async (model, more = {}) => {
  const stream = client.responses.stream({ model: name(model), input: "Hello", ...more });
  return await stream.finalResponse();
};

const raw = await events(await client.responses.create({ model: name("text"), input: "Hello", stream: true }));
const id = raw.at(-1).response.id;
const rest = await events(await client.responses.retrieve(id, { stream: true, starting_after: 4 }));

const background = await client.responses.create({ model: name("stalled"), input: "Hello", background: true });
const cancelled = await client.responses.cancel(background.id);

const calls = await helper("own-tool", { tools: [place] });
const call = calls.output.find((item) => item.type === "function_call");
const answer = await client.responses.create({
  model: name("own-tool"),
  tools: [place],
  input: [
    { role: "user", content: "Hello" },
    ...calls.output,
    { type: "function_call_output", call_id: call.call_id, output: "here" },
  ],
});

const sdk = createOpenAI({ baseURL, apiKey: "k" });
const aisdk = async (model, more = {}) => {
  const errors = [];
  const result = streamText({
    model: sdk(name(model)),
    prompt: "Hello",
    maxRetries: 0,
    onError: ({ error }) => errors.push(String(error.message ?? error)),
    ...more,
  });
  const parts = [];
  for await (const part of result.fullStream) parts.push(part);
  return {
    text: parts.filter((part) => part.type === "text-delta").map((part) => part.text).join(""),
    reasoning: parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text).join(""),
    calls: parts.filter((part) => part.type === "tool-call").map((part) => part.toolName),
    finish: parts.find((part) => part.type === "finish")?.finishReason,
    errors,
  };
};

console.log(
  JSON.stringify({
    text: (await helper("text")).output_text,
    raw: raw.map((event) => event.sequence_number),
    same: JSON.stringify(rest) === JSON.stringify(raw.slice(5)),
    call: { name: call.name, arguments: call.arguments },
    answer: answer.output_text,
    queued: background.status,
    cancelled: cancelled.status,
    cut: (await helper("cut")).status,
    refused: await failed(client.responses.create({ model: name("text"), input: "Hello", max_tool_calls: 2 })),
    failing: await failed(client.responses.create({ model: name("failing"), input: "Hello" })),
    aisdk: {
      text: await aisdk("text"),
      call: await aisdk("own-tool", {
        tools: { place: tool({ description: "where", inputSchema: jsonSchema({ type: "object", properties: {} }) }) },
      }),
      cut: await aisdk("cut"),
    },
  }),
);
