// The clients of two protocols, unmodified: node ask.mjs BASE; prints what each of them read, by model.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogle } from "@ai-sdk/google";
import Anthropic from "@anthropic-ai/sdk";
import { GoogleGenAI } from "@google/genai";
import { jsonSchema, streamText, tool } from "ai";

const [base] = process.argv.slice(2);
const weather = { name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } };
const read = () => ({ text: "", thinking: "", calls: [], end: null, error: null });

const anthropic = new Anthropic({ apiKey: "k", baseURL: `${base}/anthropic`, maxRetries: 0 });
async function byAnthropic(model) {
  const got = read();
  const body = { model: `anthropic/${model}`, max_tokens: 100, messages: [{ role: "user", content: "hi" }], tools: [weather] };
  try {
    const message = await anthropic.messages.stream(body).finalMessage();
    for (const block of message.content) {
      if (block.type === "text") got.text += block.text;
      if (block.type === "thinking") got.thinking += block.thinking;
      if (block.type === "tool_use") got.calls.push([block.name, block.input]);
    }
    got.end = message.stop_reason;
  } catch (error) {
    got.error = error.constructor.name;
  }
  return got;
}

const google = new GoogleGenAI({ apiKey: "k", httpOptions: { baseUrl: `${base}/gemini` } });
async function byGoogle(model) {
  const got = read();
  const { name, input_schema: parametersJsonSchema } = weather;
  const config = { thinkingConfig: { includeThoughts: true }, tools: [{ functionDeclarations: [{ name, parametersJsonSchema }] }] };
  try {
    for await (const chunk of await google.models.generateContentStream({ model: `gemini/${model}`, contents: "hi", config })) {
      for (const part of chunk.candidates?.[0]?.content?.parts ?? []) {
        if (part.functionCall) got.calls.push([part.functionCall.name, part.functionCall.args]);
        else if (part.thought) got.thinking += part.text ?? "";
        else got.text += part.text ?? "";
      }
      got.end = chunk.candidates?.[0]?.finishReason ?? got.end;
    }
  } catch (error) {
    got.error = error.constructor.name;
  }
  return got;
}

async function byAiSdk(model, providerOptions = {}) {
  const got = read();
  const tools = { weather: tool({ inputSchema: jsonSchema(weather.input_schema) }) };
  const result = streamText({ model, prompt: "hi", maxRetries: 0, tools, providerOptions, onError: () => {} });
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") got.text += part.text;
    if (part.type === "reasoning-delta") got.thinking += part.text;
    if (part.type === "tool-call") got.calls.push([part.toolName, part.input]);
    if (part.type === "finish") got.end = part.finishReason;
    if (part.type === "error") got.error = part.error?.constructor?.name ?? "error";
  }
  return got;
}

const messages = createAnthropic({ apiKey: "k", baseURL: `${base}/anthropic/v1` });
const contents = createGoogle({ apiKey: "k", baseURL: `${base}/gemini/v1beta` });
const thoughts = { google: { thinkingConfig: { includeThoughts: true } } };
const clients = {
  anthropic: byAnthropic,
  google: byGoogle,
  "ai-sdk anthropic": (model) => byAiSdk(messages(`anthropic/${model}`)),
  "ai-sdk google": (model) => byAiSdk(contents(`gemini/${model}`), thoughts),
};
const told = {};
for (const [name, ask] of Object.entries(clients)) {
  told[name] = {};
  for (const model of ["text", "calls", "refuses", "cut"]) told[name][model] = await ask(model);
}
console.log(JSON.stringify(told));
