// OpenAI's own client of the Responses API: node responses.mjs BASE; prints what it was told.
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
  }),
);
