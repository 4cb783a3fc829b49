// Chats as `useChat` holds them, without a page: node ui.mjs PACKAGE BASE [socket]; prints what each of them ended with.
const [name, base, over] = process.argv.slice(2);
const ai = await import(name);
const version = { ai5: 5, ai6: 6, ai: 7 }[name];
const api = `${base}/api/chat${version === 7 ? "?ui=7" : ""}`;

class State {
  messages = [];
  status = "ready";
  error = undefined;
  pushMessage = (message) => (this.messages = [...this.messages, message]);
  popMessage = () => (this.messages = this.messages.slice(0, -1));
  replaceMessage = (index, message) =>
    (this.messages = [...this.messages.slice(0, index), this.snapshot(message), ...this.messages.slice(index + 1)]);
  snapshot = (thing) => structuredClone(thing);
}

class Chat extends ai.AbstractChat {
  constructor({ messages = [], ...options }) {
    const state = new State();
    state.messages = messages;
    super({ state, ...options });
  }
}

// ?ui=7 goes with the POST; the resume is at another path, so it needs the query too.
const transport = (body = {}, headers = {}) =>
  over === "socket" ? new ai.WebSocketChatTransport({ url: `${base}/api/chat`, body, headers }) :
  new ai.DefaultChatTransport({
    api,
    body,
    headers,
    prepareReconnectToStreamRequest: ({ id }) => ({ api: `${base}/api/chat/${encodeURIComponent(id)}/stream` }),
  });

const until = async (condition) => {
  for (let n = 0; !condition(); n++) {
    if (n > 3000) throw new Error("it never came");
    await new Promise((done) => setTimeout(done, 10));
  }
};

const text = (chat) =>
  chat.messages
    .filter((message) => message.role === "assistant")
    .slice(-1)
    .flatMap((message) => message.parts)
    .filter((part) => part.type === "text")
    .map((part) => part.text)
    .join("");

const told = (chat) => ({
  status: chat.status,
  error: chat.error?.message,
  messages: chat.messages,
  text: text(chat),
});

const say = async (body, more = {}) => {
  const chat = new Chat({ id: crypto.randomUUID(), transport: transport(body), ...more });
  await chat.sendMessage({ text: "Hello" });
  return chat;
};

const stories = {
  async text() {
    const chat = await say({ model: "anthropic/text" });
    await chat.sendMessage({ text: "And now?" });
    return told(chat);
  },
  async bus_tool() {
    const ran = [];
    const chat = await say({ model: "anthropic/bus-tool", tools: ["weather"] }, { onToolCall: (call) => ran.push(call) });
    return { ...told(chat), ran };
  },
  async own_tool() {
    const tools = [{ name: "place", description: "Where the user is", inputSchema: { type: "object" } }];
    const chat = new Chat({
      id: crypto.randomUUID(),
      transport: transport({ model: "anthropic/own-tool", tools }),
      sendAutomaticallyWhen: ai.lastAssistantMessageIsCompleteWithToolCalls,
      onToolCall: ({ toolCall }) => {
        const output = { city: "Bonn" };
        void chat.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output });
      },
    });
    await chat.sendMessage({ text: "Hello" });
    await until(() => chat.status === "ready" && chat.lastMessage.parts.some((part) => part.type === "text"));
    return told(chat);
  },
  async writing() {
    const tools = [{ name: "write", inputSchema: { type: "object" } }];
    const calls = [];
    let asks = 0;
    const chat = new Chat({
      id: crypto.randomUUID(),
      transport: transport({ model: "anthropic/writing", tools }),
      sendAutomaticallyWhen: (state) => ai.lastAssistantMessageIsCompleteWithToolCalls(state) && ++asks < 9,
      onToolCall: ({ toolCall }) => void calls.push(toolCall.input),
    });
    const inputs = new Set();
    const sent = chat.sendMessage({ text: "Hello" });
    let over = false;
    void sent.finally(() => (over = true));
    await until(() => {
      for (const part of chat.lastMessage?.parts ?? []) if (part.input?.text) inputs.add(part.input.text);
      return over;
    });
    return { ...told(chat), calls, asks, inputs: [...inputs] };
  },
  async refused() {
    return told(await say({ model: "anthropic/text", frobnicate: 1 }));
  },
  async unknown_model() {
    return told(await say({ model: "nobody/knows" }));
  },
  async failed() {
    return told(await say({ model: "anthropic/failing" }));
  },
  async cut() {
    return told(await say({ model: "anthropic/cut" }));
  },
  async retried() {
    return told(await say({ model: "anthropic/retried" }));
  },
  async stopped() {
    const chat = new Chat({ id: crypto.randomUUID(), transport: transport({ model: "anthropic/stalled" }) });
    const sent = chat.sendMessage({ text: "Hello" });
    await until(() => text(chat));
    const answer = await fetch(`${base}/api/chat/${chat.id}/stop`, { method: "POST" });
    await sent;
    const again = await fetch(`${base}/api/chat/${chat.id}/stop`, { method: "POST" });
    return { ...told(chat), stop: await answer.json(), again: await again.json() };
  },
  async resumed() {
    const id = `chat ${crypto.randomUUID()}`;
    const way = transport({ model: "anthropic/slow" });
    const first = new Chat({ id, transport: way });
    const sent = first.sendMessage({ text: "Hello" });
    await until(() => text(first));
    const messages = structuredClone(first.messages);
    await (way.close ? way.close() : first.stop()); // closes the socket alone: the run goes on
    await sent;
    // Version 5 appends a replay to an answer that it has already.
    const chat = new Chat({ id, messages: version === 5 ? messages.slice(0, 1) : messages, transport: transport() });
    await chat.resumeStream();
    const late = new Chat({ id, messages: chat.messages, transport: transport() });
    await late.resumeStream();
    return { ...told(chat), late: told(late), fetched: (await fetch(`${base}/api/chat/${id}/stream`)).status };
  },
  async aborted() {
    const id = crypto.randomUUID();
    const chat = new Chat({ id, transport: transport({ model: "anthropic/stalled" }) });
    const sent = chat.sendMessage({ text: "Hello" });
    await until(() => text(chat));
    await chat.stop();
    await sent;
    // Over a socket the run has been cancelled, so nothing is left to stop.
    let stop = { stopped: true };
    for (let n = 0; over === "socket" && stop.stopped && n < 100; n++) {
      const seen = await fetch(`${base}/api/chat/${id}/stream`);
      stop = { stopped: seen.status !== 204 };
      await seen.body?.cancel();
    }
    if (over !== "socket") stop = await (await fetch(`${base}/api/chat/${id}/stop`, { method: "POST" })).json();
    return { ...told(chat), stop };
  },
  async rewritten() {
    const chat = await say({ model: "anthropic/counting" });
    await chat.sendMessage({ text: "And now?" });
    const twice = text(chat);
    await chat.regenerate();
    const again = text(chat);
    const first = chat.messages[0].id;
    await chat.sendMessage({ text: "Something else", messageId: first });
    return { ...told(chat), twice, again };
  },
  async superseded() {
    const id = crypto.randomUUID();
    const first = new Chat({ id, transport: transport({ model: "anthropic/stalled" }) });
    const sent = first.sendMessage({ text: "Hello" });
    await until(() => text(first));
    const second = new Chat({ id, transport: transport({ model: "anthropic/text" }) });
    await second.sendMessage({ text: "Something else" });
    await sent;
    return { ...told(second), first: told(first) };
  },
};

const ended = Object.entries(stories).map(async ([story, run]) => [story, await run()]);
const all = JSON.stringify(Object.fromEntries(await Promise.all(ended)));
process.stdout.write(all, () => process.exit()); // WebSockets stay open until their transports are closed
