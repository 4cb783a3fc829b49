// The AI SDK's provider for OpenAI-compatible servers: node compatible.mjs BASE; prints what each call ended with.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, streamText, tool } from "ai";

const [base] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "tokenbus", baseURL: `${base}/v1`, apiKey: "any", includeUsage: true });
const ask = async (model, more = {}) => {
  const errors = [];
  const onError = ({ error }) => void errors.push({ message: error.message, status: error.statusCode });
  const answer = streamText({ model: provider(`anthropic/${model}`), prompt: "Hello", maxRetries: 0, onError, ...more });
  const told = { text: "", reasoning: "", calls: [], finish: undefined, errors };
  for await (const part of answer.fullStream) {
    if (part.type === "text-delta") told.text += part.text;
    if (part.type === "reasoning-delta") told.reasoning += part.text;
    if (part.type === "tool-call") told.calls.push([part.toolName, part.input]);
    if (part.type === "finish") [told.finish, told.usage] = [part.finishReason, part.totalUsage];
  }
  return told;
};
const place = tool({ description: "Where the user is", inputSchema: jsonSchema({ type: "object" }) });
const [text, call, cut, failing] = await Promise.all([
  ask("text"),
  ask("own-tool", { tools: { place } }),
  ask("cut"),
  ask("failing"),
]);
console.log(JSON.stringify({ text, call, cut, failing }));
