// A chat over the transport of the page docs/guides/use-chat.md: node socket.mjs; prints what it ended with.
import { AbstractChat } from "ai";
import { webSocketTransport } from "./use-chat.3.mjs";

class Chat extends AbstractChat {}
const state = {
  messages: [],
  status: "ready",
  error: undefined,
  pushMessage: (message) => state.messages.push(message),
  popMessage: () => state.messages.pop(),
  replaceMessage: (index, message) => (state.messages[index] = state.snapshot(message)),
  snapshot: (thing) => structuredClone(thing),
};
const chat = new Chat({ id: "page", state, transport: webSocketTransport(() => "any") });
await chat.sendMessage({ text: "Hello" });
const text = chat.lastMessage.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
// The socket stays open until its transport is closed.
process.stdout.write(JSON.stringify({ status: chat.status, text }), () => process.exit());
