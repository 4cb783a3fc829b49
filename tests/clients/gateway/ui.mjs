// Chats as `useChat` holds them, without a page: node ui.mjs PACKAGE BASE [socket]; prints what each of them ended with.
const [name, base, over] = process.argv.slice(2);
const ai = await import(name);
const version = { ai5: 5, ai6: 6, ai: 7 }[name];
const api = `${base}/api/chat${version >= 6 ? `?ui=${version}` : ""}`;

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

// --- chats that are asked ------------------------------------------------------------------------------------------

const PAYS = { model: "anthropic/pays", tools: ["pay"] };
const { sendAutomaticallyWhen: decides } = await import("./use-chat.2.mjs");
const toolParts = (chat) => chat.lastMessage?.parts.filter((part) => part.toolCallId) ?? [];
const states = (chat) => toolParts(chat).map((part) => part.state);
const approvals = (chat) => toolParts(chat).filter((part) => part.state === "approval-requested").map((part) => part.approval.id);
const runOf = (chat) => chat.messages[1].metadata.run;
const answered = (chat) => until(() => chat.status === "error" || (chat.status === "ready" && /So:|over/.test(text(chat))));
const native = async (method, path, body) => {
  const answer = await fetch(`${base}${path}`, { method, body: body && JSON.stringify(body) });
  return await answer.json();
};
const resumed = async (chat) => {
  const events = await (await fetch(`${base}/runs/${runOf(chat)}/events`)).text();
  return [...events.matchAll(/^data: (.*)$/gm)].map(([, data]) => JSON.parse(data)).filter((event) => event.type === "resumed");
};
const ask = async (body, more = {}) => {
  const chat = await say(body, { sendAutomaticallyWhen: decides, ...more });
  if (chat.error) throw chat.error;
  return chat;
};
const post = async (body) => {
  const answer = await fetch(api, { method: "POST", body: JSON.stringify({ ...PAYS, ...body }) });
  return { status: answer.status, text: await answer.text() };
};

const streamedText = (stream) =>
  [...stream.matchAll(/^data: (\{.*)$/gm)].map(([, data]) => JSON.parse(data).delta ?? "").join("");

const asking = {
  async approved() {
    const chat = await ask(PAYS);
    const before = states(chat);
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await answered(chat);
    return { ...told(chat), error: chat.error?.message ?? null, before, resumed: await resumed(chat) };
  },
  async denied() {
    const chat = await ask(PAYS);
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: false, reason: "too dear" });
    await answered(chat);
    return told(chat);
  },
  async twice() {
    let posts = 0;
    const way = transport({ ...PAYS, model: "anthropic/pays-twice" });
    const send = way.sendMessages.bind(way);
    way.sendMessages = (options) => (posts++, send(options));
    const chat = await ask({}, { transport: way });
    const [first, second] = approvals(chat);
    await chat.addToolApprovalResponse({ id: second, approved: false });
    await chat.addToolApprovalResponse({ id: first, approved: true });
    await answered(chat);
    return { ...told(chat), posts };
  },
  async reloaded() {
    const left = await ask(PAYS);
    const messages = left.messages.slice(0, 1);
    const chat = new Chat({ id: left.id, messages, transport: transport(PAYS), sendAutomaticallyWhen: decides });
    await chat.resumeStream();
    const before = states(chat);
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await answered(chat);
    return { ...told(chat), before };
  },
  async overtaken() {
    const chat = await ask(PAYS);
    const { waiting } = await native("GET", `/runs/${runOf(chat)}/waiting`);
    const other = { type: "approval", decision: "deny", by: "bob" };
    const fate = await native("POST", `/runs/${runOf(chat)}/waiting/${waiting[0].wait}`, other);
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await answered(chat);
    const late = { status: chat.status, error: chat.error?.message };
    await chat.resumeStream();
    return { ...told(chat), late, by: fate.decision, resumed: await resumed(chat) };
  },
  async repeated() {
    const chat = await ask({ ...PAYS }, { sendAutomaticallyWhen: undefined });
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    const said = { id: chat.id, messages: chat.messages, trigger: "submit-message", messageId: chat.lastMessage.id };
    const whole = (answer) => ({ ...answer, text: streamedText(answer.text) });
    const answers = [whole(await post(said)), whole(await post(said))];
    return { answers, resumed: await resumed(chat) };
  },
  async hostile() {
    const chat = await ask(PAYS, { sendAutomaticallyWhen: undefined });
    const other = await ask(PAYS, { sendAutomaticallyWhen: undefined });
    const saying = (approval) => {
      const messages = structuredClone(chat.messages);
      Object.assign(messages[1].parts.find((part) => part.toolCallId), { state: "approval-responded", approval });
      return post({ id: chat.id, messages });
    };
    const answers = [];
    for (const id of [approvals(other)[0], `${runOf(chat)}:9.9`, runOf(chat), "nobody", "nobody:0.0", `${runOf(chat)}:0.0\n`, ":", "🌤️".repeat(99)])
      answers.push(await saying({ id, approved: true }));
    const malformed = [(await saying({ id: approvals(chat)[0], approved: "yes" })).status, (await saying({ approved: true })).status];
    const { waiting } = await native("GET", `/runs/${runOf(chat)}/waiting`);
    return { answers, malformed, resumed: waiting.length === 1 ? [] : ["decided"] };
  },
  async in_place() {
    const ran = [];
    const tools = ["pay", { name: "place", inputSchema: { type: "object" } }];
    const chat = new Chat({
      id: crypto.randomUUID(),
      transport: transport({ model: "anthropic/pays-in-place", tools }),
      sendAutomaticallyWhen: decides,
      onToolCall: ({ toolCall }) => {
        ran.push(toolCall.toolName);
        void chat.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output: { city: "Bonn" } });
      },
    });
    await chat.sendMessage({ text: "Hello" });
    await until(() => chat.status === "ready" && approvals(chat).length);
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await answered(chat);
    return { ...told(chat), ran };
  },
  async shown() {
    let ran = 0;
    const chat = new Chat({
      id: crypto.randomUUID(),
      transport: transport({ model: "anthropic/shows", tools: ["show"] }),
      sendAutomaticallyWhen: decides,
      onToolCall: ({ toolCall }) => {
        ran++;
        void chat.addToolOutput({ tool: toolCall.toolName, toolCallId: toolCall.toolCallId, output: "seen" });
      },
    });
    await chat.sendMessage({ text: "Hello" });
    const ran_before = ran;
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await answered(chat);
    return { ...told(chat), ran, ran_before };
  },
  async typed() {
    const chat = await ask(PAYS, { sendAutomaticallyWhen: undefined });
    await chat.addToolApprovalResponse({ id: approvals(chat)[0], approved: true });
    await chat.sendMessage({ text: "And hurry." });
    return { ...told(chat), resumed: await resumed(chat) };
  },
};
// Version 5 has no approvals.
if (version >= 6) Object.assign(stories, asking);

const ended = Object.entries(stories).map(async ([story, run]) => [story, await run()]);
const all = JSON.stringify(Object.fromEntries(await Promise.all(ended)));
process.stdout.write(all, () => process.exit()); // WebSockets stay open until their transports are closed
