// `useChat` of the page docs/guides/use-chat.md in a document of jsdom: node react.mjs; prints what was on the screen.
import { JSDOM } from "jsdom";

const { window } = new JSDOM("<!doctype html><body></body>", { url: "http://app.example/" });
Object.assign(globalThis, { window, document: window.document, IS_REACT_ACT_ENVIRONMENT: false });
const { createElement } = await import("react");
const { createRoot } = await import("react-dom/client");
const { useTokenbusChat } = await import("./use-chat.1.mjs");

const until = async (condition) => {
  for (let n = 0; !condition(); n++) {
    if (n > 6000) throw new Error("it never came");
    await new Promise((done) => setTimeout(done, 10));
  }
};
const text = ({ messages }) =>
  messages
    .filter((message) => message.role === "assistant")
    .flatMap((message) => message.parts)
    .filter((part) => part.type === "text")
    .map((part) => part.text)
    .join("");

function open(id, messages = []) {
  const screen = { chat: undefined };
  const root = createRoot(window.document.body.appendChild(window.document.createElement("div")));
  const Page = () => {
    screen.chat = useTokenbusChat(id, { messages });
    return createElement("p", null, text(screen.chat));
  };
  root.render(createElement(Page));
  return { screen, close: () => root.unmount(), shown: () => text(screen.chat), status: () => screen.chat.status };
}
const rest = async (page) => {
  await until(() => page.status() === "ready" && page.shown());
  return { status: page.status(), text: page.shown() };
};
const begin = async (id) => {
  const page = open(id);
  await until(() => page.screen.chat?.status === "ready");
  void page.screen.chat.sendMessage({ text: "Hello" });
  await until(() => page.shown());
  return page;
};

const sent = await rest(await begin("react-1"));
const first = await begin("react-2");
const left = first.shown();
const messages = structuredClone(first.screen.chat.messages);
first.close();
const second = open("react-2", messages);
await until(() => second.screen.chat && second.shown() !== left);
const resumed = await rest(second);
const third = await begin("react-3");
await third.screen.chat.stop();
const stopped = await rest(third);
console.log(JSON.stringify({ sent, left, resumed, stopped }));
process.exit(0);
