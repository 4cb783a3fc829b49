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

const told = (page) =>
  page.screen.chat.messages.map(({ role, parts }) => [role, parts.filter((part) => part.type === "text").map((part) => part.text).join("")]);
const answers = (page) => told(page).filter(([role]) => role === "assistant");
const say = (page, text, body) => void page.screen.chat.sendMessage({ text }, { body });
const lines = async (page, count) => {
  await until(() => page.status() === "ready" && answers(page).length === count && answers(page)[count - 1][1]);
  return told(page);
};

// What is said while the model speaks waits, and both answers are whole.
const queueing = await begin("react-4");
say(queueing, "And now?", { whenBusy: "enqueue", model: "anthropic/counting" });
const queued = await lines(queueing, 2);
// It goes into the open answer: after the tool, before the model's next words.
const steering = open("react-5");
await until(() => steering.screen.chat?.status === "ready");
const steerable = { model: "anthropic/steerable", tools: ["weather"] };
say(steering, "Hello", steerable);
await until(() => steering.shown());
say(steering, "In Celsius.", { ...steerable, whenBusy: "steer" });
const steered = await lines(steering, 2);
// On another device: it waits for the first one's answer; its page is closed, and the next one has its answer.
const here = await begin("react-6");
const there = open("react-6");
await until(() => there.screen.chat && there.shown());
say(there, "And now?", { whenBusy: "enqueue", model: "anthropic/counting" });
await until(() => there.screen.chat.messages.some(({ role, parts }) => role === "user" && parts[0].text === "And now?"));
await new Promise((done) => setTimeout(done, 300)); // until the request is under way
const seen = structuredClone(there.screen.chat.messages);
there.close();
const back = open("react-6", seen.filter(({ role }) => role === "user"));
await until(() => back.screen.chat && answers(back).some(([, text]) => text === "3"));
const elsewhere = { here: (await rest(here)).text, back: answers(back).at(-1)[1] };
console.log(JSON.stringify({ queued, steered, elsewhere, sent, left, resumed, stopped }));
process.exit(0);
