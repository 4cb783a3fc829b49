// Clients for Node, driven by lines of JSON: node clients.mjs BASE. {id, client, method, model, said} is answered by
// {id, value} or {id, error}; `stream` has {id, piece} before, and ends early at a line of its id alone.
import { HttpAgent } from "@ag-ui/client";
import Anthropic from "@anthropic-ai/sdk";
import { GoogleGenAI } from "@google/genai";
import OpenAI from "openai";
import { createInterface } from "node:readline";

const base = process.argv[2];
globalThis.AI_SDK_LOG_WARNINGS = false; // they would be in the lines
const [HELLO, AND_NOW] = ["Hello.", "And tomorrow?"];
const weather = ({ city }) => `rain in ${city}`;
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const record = {
  type: "object",
  properties: { city: { type: "string" }, rain: { type: "boolean" } },
  required: ["city", "rain"],
  additionalProperties: false,
};
const user = (content) => ({ role: "user", content });
const parts = (said, file, text) => (typeof said === "string" ? said : said.map((p) => (p.data ? file(p) : text(p))));
const url = ({ mediaType, data }) => `data:${mediaType};base64,${data}`;

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: "any" });
const chat = {
  create: async (model, messages, more) => (await openai.chat.completions.create({ model, messages, ...more })).choices[0].message,
  async ask(model, said) {
    const file = (p) =>
      p.mediaType === "image/png"
        ? { type: "image_url", image_url: { url: url(p) } }
        : { type: "file", file: { filename: "a.pdf", file_data: url(p) } };
    return (await this.create(model, [user(parts(said, file, (text) => ({ type: "text", text })))])).content;
  },
  async stream(model, emit, signal) {
    const stream = openai.chat.completions.stream({ model, messages: [user(HELLO)] }, { signal });
    for await (const chunk of stream) emit(chunk.choices[0]?.delta.content);
    await stream.finalMessage();
  },
  async tool(model) {
    const run = openai.chat.completions.runTools({
      model,
      messages: [user(HELLO)],
      tools: [{ type: "function", function: { name: "get_weather", parameters, function: weather, parse: JSON.parse } }],
    });
    return await run.finalContent();
  },
  async turn(model) {
    const first = await this.create(model, [user(HELLO)]);
    return (await this.create(model, [user(HELLO), first, user(AND_NOW)])).content;
  },
  async record(model) {
    const response_format = { type: "json_schema", json_schema: { name: "weather", schema: record, strict: true } };
    return JSON.parse((await this.create(model, [user(HELLO)], { response_format })).content);
  },
};

const responses = {
  async ask(model, said) {
    const file = (p) =>
      p.mediaType === "image/png"
        ? { type: "input_image", image_url: url(p) }
        : { type: "input_file", filename: "a.pdf", file_data: url(p) };
    const input = [user(parts(said, file, (text) => ({ type: "input_text", text })))];
    return (await openai.responses.create({ model, input })).output_text;
  },
  async stream(model, emit, signal) {
    const stream = openai.responses.stream({ model, input: HELLO }, { signal });
    for await (const event of stream) if (event.type === "response.output_text.delta") emit(event.delta);
    const { status, error } = await stream.finalResponse();
    if (status !== "completed") throw new Error(error?.message);
  },
  async tool(model) {
    const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
    const first = await openai.responses.create({ model, input: HELLO, tools });
    const { call_id, arguments: input } = first.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id, output: weather(JSON.parse(input)) };
    return (await openai.responses.create({ model, input: [user(HELLO), ...first.output, output], tools })).output_text;
  },
  async turn(model) {
    const first = await openai.responses.create({ model, input: HELLO });
    return (await openai.responses.create({ model, input: AND_NOW, previous_response_id: first.id })).output_text;
  },
  async record(model) {
    const text = { format: { type: "json_schema", name: "weather", schema: record, strict: true } };
    return JSON.parse((await openai.responses.create({ model, input: HELLO, text })).output_text);
  },
};

const claude = new Anthropic({ baseURL: `${base}/anthropic`, apiKey: "any" });
const messages = {
  create: (model, messages, more) => claude.messages.create({ model, max_tokens: 99, messages, ...more }),
  text: (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join(""),
  async ask(model, said) {
    const file = ({ mediaType, data }) => ({
      type: mediaType === "image/png" ? "image" : "document",
      source: { type: "base64", media_type: mediaType, data },
    });
    return this.text(await this.create(model, [user(parts(said, file, (text) => ({ type: "text", text })))]));
  },
  async stream(model, emit, signal) {
    const stream = claude.messages.stream({ model, max_tokens: 99, messages: [user(HELLO)] }, { signal });
    stream.on("text", emit);
    await stream.finalMessage();
  },
  async tool(model) {
    const tools = [{ name: "get_weather", input_schema: parameters, run: weather, parse: (input) => input }];
    return this.text(await claude.beta.messages.toolRunner({ model, max_tokens: 99, messages: [user(HELLO)], tools }));
  },
  async turn(model) {
    const { content } = await this.create(model, [user(HELLO)]);
    return this.text(await this.create(model, [user(HELLO), { role: "assistant", content }, user(AND_NOW)]));
  },
  async record(model) {
    const output_config = { format: { type: "json_schema", schema: record } };
    return JSON.parse(this.text(await this.create(model, [user(HELLO)], { output_config })));
  },
};

const genai = new GoogleGenAI({ apiKey: "any", httpOptions: { baseUrl: `${base}/gemini` } });
const google = {
  async ask(model, said) {
    const file = ({ mediaType, data }) => ({ inlineData: { mimeType: mediaType, data } });
    return (await genai.models.generateContent({ model, contents: parts(said, file, (text) => ({ text })) })).text;
  },
  async stream(model, emit, abortSignal) {
    const config = { abortSignal };
    for await (const chunk of await genai.models.generateContentStream({ model, contents: HELLO, config })) emit(chunk.text);
  },
  async tool(model) {
    const tool = {
      tool: async () => ({ functionDeclarations: [{ name: "get_weather", parametersJsonSchema: parameters }] }),
      callTool: async (calls) =>
        calls.map(({ id, name, args }) => ({ functionResponse: { id, name, response: { output: weather(args) } } })),
    };
    return (await genai.models.generateContent({ model, contents: HELLO, config: { tools: [tool] } })).text;
  },
  async turn(model) {
    const chat = genai.chats.create({ model });
    await chat.sendMessage({ message: HELLO });
    return (await chat.sendMessage({ message: AND_NOW })).text;
  },
  async record(model) {
    const config = { responseMimeType: "application/json", responseJsonSchema: record };
    return JSON.parse((await genai.models.generateContent({ model, contents: HELLO, config })).text);
  },
};

// The AI SDK of one version, with one of its providers.
const aiSdk = (ai, provider) => ({
  async ask(model, said) {
    const content = parts(said, (p) => ({ type: "file", ...p }), (text) => ({ type: "text", text }));
    return (await ai.generateText({ model: provider(model), messages: [user(content)] })).text;
  },
  async stream(model, emit, abortSignal) {
    const result = ai.streamText({ model: provider(model), prompt: HELLO, abortSignal, onError: () => {} });
    for await (const part of result.fullStream) {
      if (part.type === "text-delta") emit(part.text);
      if (part.type === "error") throw part.error;
      if (part.type === "finish" && part.finishReason === "error") throw new Error("it ended with an error");
    }
  },
  async tool(model) {
    const tools = { get_weather: ai.tool({ inputSchema: ai.jsonSchema(parameters), execute: weather }) };
    const stopWhen = (ai.isStepCount ?? ai.stepCountIs)(3);
    return (await ai.generateText({ model: provider(model), prompt: HELLO, tools, stopWhen })).text;
  },
  async turn(model) {
    const first = await ai.generateText({ model: provider(model), messages: [user(HELLO)] });
    const messages = [user(HELLO), ...first.response.messages, user(AND_NOW)];
    return (await ai.generateText({ model: provider(model), messages })).text;
  },
  record: async (model) =>
    (await ai.generateObject({ model: provider(model), prompt: HELLO, schema: ai.jsonSchema(record) })).object,
});

// A chat as `useChat` holds it, without a page. To leave it does not end its run.
const useChat = (ai, version) => {
  class State {
    messages = [];
    status = "ready";
    error = undefined;
    pushMessage = (message) => (this.messages = [...this.messages, message]);
    popMessage = () => (this.messages = this.messages.slice(0, -1));
    replaceMessage = (index, message) => {
      this.messages = this.messages.toSpliced(index, 1, this.snapshot(message));
      this.seen?.(text(this.messages));
    };
    snapshot = (thing) => structuredClone(thing);
  }
  const text = (messages) =>
    (messages.at(-1)?.parts ?? []).filter((part) => part.type === "text").map((part) => part.text).join("");
  const open = (body, more = {}, state = new State()) => {
    const transport = new ai.DefaultChatTransport({ api: `${base}/api/chat${version === 7 ? "?ui=7" : ""}`, body });
    return new (class extends ai.AbstractChat {})({ id: crypto.randomUUID(), state, transport, ...more });
  };
  const answered = (chat) => {
    if (chat.error) throw chat.error;
    return text(chat.messages);
  };
  return {
    async ask(model, said) {
      const chat = open({ model });
      const files = (typeof said === "string" ? [] : said).filter((p) => p.data);
      const list = files.map((p) => ({ type: "file", mediaType: p.mediaType, filename: "a", url: url(p) }));
      await chat.sendMessage({ text: typeof said === "string" ? said : said.find((p) => !p.data), files: list });
      return answered(chat);
    },
    async stream(model, emit) {
      const state = new State();
      let had = "";
      state.seen = (text) => (emit(text.slice(had.length)), (had = text));
      const chat = open({ model }, {}, state);
      await chat.sendMessage({ text: HELLO });
      answered(chat);
    },
    async tool(model) {
      const chat = open({ model, tools: [{ name: "get_weather", inputSchema: parameters }] }, {
        sendAutomaticallyWhen: ai.lastAssistantMessageIsCompleteWithToolCalls,
        onToolCall({ toolCall: { toolName: tool, toolCallId, input } }) {
          void chat.addToolOutput({ tool, toolCallId, output: weather(input) });
        },
      });
      await chat.sendMessage({ text: HELLO });
      while (chat.status !== "error" && !(chat.status === "ready" && text(chat.messages)))
        await new Promise((done) => setTimeout(done, 10));
      return answered(chat);
    },
    async turn(model) {
      const chat = open({ model });
      await chat.sendMessage({ text: HELLO });
      await chat.sendMessage({ text: AND_NOW });
      return answered(chat);
    },
  };
};

const agui = {
  async run(agent, model, more = {}, subscriber = {}) {
    let failed;
    const seen = {
      onRunFailed: ({ error }) => void (failed = error),
      onRunErrorEvent: ({ event }) => void (failed = new Error(event.message)),
      ...subscriber,
    };
    await agent.runAgent({ forwardedProps: { model }, ...more }, seen).catch((error) => (failed = error));
    if (failed) throw failed;
    return agent.messages.filter((message) => message.role === "assistant").at(-1)?.content;
  },
  agent: (content = HELLO) =>
    new HttpAgent({ url: `${base}/agui`, threadId: crypto.randomUUID(), initialMessages: [{ id: "u1", role: "user", content }] }),
  ask(model, said) {
    const file = ({ mediaType, data }) => ({
      type: mediaType === "image/png" ? "image" : "document",
      source: { type: "data", value: data, mimeType: mediaType },
    });
    return this.run(this.agent(parts(said, file, (text) => ({ type: "text", text }))), model);
  },
  async stream(model, emit) {
    await this.run(this.agent(), model, {}, { onTextMessageContentEvent: ({ event }) => emit(event.delta) });
  },
  async tool(model) {
    const agent = this.agent();
    const tools = [{ name: "get_weather", description: "The weather", parameters }];
    await this.run(agent, model, { tools });
    const [call] = agent.messages.flatMap((message) => message.toolCalls ?? []);
    const content = weather(JSON.parse(call.function.arguments));
    agent.addMessage({ id: "t1", role: "tool", toolCallId: call.id, content });
    return this.run(agent, model, { tools });
  },
  async turn(model) {
    const agent = this.agent();
    await this.run(agent, model);
    agent.addMessage({ id: "u2", role: "user", content: AND_NOW });
    return this.run(agent, model);
  },
};

const clients = { chat, responses, messages, google, agui };
for (const [version, name] of [[5, "ai5"], [6, "ai6"], [7, "ai"]]) {
  const from = (old, now) => import(version === 7 ? `@ai-sdk/${now}` : `${name}-${old}`);
  const ai = await import(name);
  const [{ createOpenAI }, { createAnthropic }, googles, { createOpenAICompatible }] = await Promise.all([
    from("openai", "openai"),
    from("anthropic", "anthropic"),
    from("google", "google"),
    from("compatible", "openai-compatible"),
  ]);
  const createGoogle = googles.createGoogle ?? googles.createGoogleGenerativeAI;
  const v1 = { baseURL: `${base}/v1`, apiKey: "any" };
  const providers = {
    openai: createOpenAI(v1),
    chat: createOpenAI(v1).chat,
    anthropic: createAnthropic({ ...v1, baseURL: `${base}/anthropic/v1` }),
    google: createGoogle({ ...v1, baseURL: `${base}/gemini/v1beta` }),
    compatible: createOpenAICompatible({ ...v1, name: "tokenbus" }),
  };
  for (const [key, provider] of Object.entries(providers)) clients[`ai${version} ${key}`] = aiSdk(ai, provider);
  clients[`useChat ${version}`] = useChat(ai, version);
}

const write = (message) => process.stdout.write(`${JSON.stringify(message)}\n`);
const words = (error) =>
  error ? `${error.name}: ${error.message} ${error.responseBody ?? ""} ${words(error.cause)} ${words(error.lastError)}` : "";
const leaving = {};
for await (const line of createInterface({ input: process.stdin })) {
  const { id, client, method, model, said } = JSON.parse(line);
  leaving[id]?.abort();
  if (!client) continue;
  leaving[id] = new AbortController();
  const more = method === "stream" ? [(piece) => piece && write({ id, piece }), leaving[id].signal] : [said];
  Promise.resolve()
    .then(() => clients[client][method](model, ...more))
    .then((value) => write({ id, value: value ?? null }), (error) => write({ id, error: words(error) || String(error) }));
}
process.exit();
