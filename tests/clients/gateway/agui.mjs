// Agents of AG-UI against a gateway: node agui.mjs BASE; prints what each of them ended with.
import { EventSchemas } from "@ag-ui/core/schemas";
import { HttpAgent, verifyEvents } from "@ag-ui/client";
import { from, lastValueFrom, toArray } from "rxjs";
import { JoiningAgent } from "./ag-ui.2.mjs";

const [base] = process.argv.slice(2);
const url = `${base}/agui`;

const until = async (condition) => {
  for (let n = 0; !condition(); n++) {
    if (n > 3000) throw new Error("it never came");
    await new Promise((done) => setTimeout(done, 10));
  }
};
const agent = (Agent = HttpAgent) =>
  new Agent({ url, initialMessages: [{ id: "u1", role: "user", content: "Hello" }], threadId: crypto.randomUUID() });
const runs = {}; // of each thread, the bus's id of its newest run
const plainFetch = globalThis.fetch;
globalThis.fetch = async (address, options) => {
  const response = await plainFetch(address, options);
  if (options?.body) runs[JSON.parse(options.body).threadId] = response.headers.get("x-tokenbus-run");
  return response;
};
const answer = (messages) =>
  messages.filter((message) => message.role === "assistant").map((message) => message.content ?? "").join("");

const run = async (one, model, more = {}) => {
  const events = [];
  let failed;
  const ended = await one
    .runAgent(
      { forwardedProps: { model: `anthropic/${model}`, ...more.props }, tools: more.tools ?? [], runId: more.runId },
      { onEvent: ({ event }) => void events.push(event), onRunFailed: ({ error }) => void (failed = error) },
    )
    .catch((error) => (failed = error));
  await lastValueFrom(from(events).pipe(verifyEvents(false), toArray()));
  for (const event of events) EventSchemas.parse(event);
  return {
    run: runs[one.threadId],
    types: events.map((event) => event.type),
    args: events.filter((event) => event.type === "TOOL_CALL_ARGS").map((event) => event.delta),
    outcome: events.at(-1)?.outcome,
    usage: events.at(-1)?.usage,
    code: events.at(-1)?.code,
    failed: failed && { message: failed.message, status: failed.status },
    ended: ended?.result,
    messages: one.messages,
    text: answer(one.messages),
  };
};

const stories = {
  text: () => run(agent(), "text"),
  bus_tool: () => run(agent(), "bus-tool", { props: { tokenbus: { tools: ["weather"] } } }),
  async own_tool() {
    const tools = [{ name: "place", description: "Where the user is", parameters: { type: "object" } }];
    const one = agent();
    const asked = await run(one, "own-tool", { tools });
    const [call] = one.messages.flatMap((message) => message.toolCalls ?? []);
    one.addMessage({ id: "t1", role: "tool", toolCallId: call.id, content: "Bonn" });
    return { asked, ...(await run(one, "own-tool", { tools })) };
  },
  writing: () => run(agent(), "writing", { tools: [{ name: "write", description: "", parameters: { type: "object" } }] }),
  cut_call: () => run(agent(), "cut-call", { tools: [{ name: "write", description: "", parameters: { type: "object" } }] }),
  refused: () => run(agent(), "text", { props: { frobnicate: 1 } }),
  failed: () => run(agent(), "failing"),
  cut: () => run(agent(), "cut"),
  retried: () => run(agent(), "retried"),
  async cancelled() {
    const one = agent();
    const runId = crypto.randomUUID();
    const told = run(one, "stalled", { runId });
    await until(() => answer(one.messages));
    const answered = await fetch(`${url}/runs/${runId}`, { method: "DELETE" });
    return { ...(await told), status: answered.status };
  },
  async queued() {
    const one = agent();
    const told = run(one, "slow");
    await until(() => answer(one.messages));
    const other = new HttpAgent({ url, threadId: one.threadId, initialMessages: [{ id: "u2", role: "user", content: "And now?" }] });
    const second = run(other, "counting");
    return { first: await told, second: await second };
  },
  async steered() {
    const props = { tokenbus: { tools: ["weather"] } };
    const one = agent();
    const told = run(one, "steerable", { props });
    await until(() => answer(one.messages));
    const other = new HttpAgent({ url, threadId: one.threadId, initialMessages: [{ id: "u2", role: "user", content: "In Celsius." }] });
    const second = run(other, "steerable", { props: { ...props, whenBusy: "steer" } });
    return { first: await told, second: await second };
  },
  async edited() {
    const one = agent();
    await run(one, "counting");
    one.addMessage({ id: "u2", role: "user", content: "And now?" });
    const twice = await run(one, "counting");
    one.setMessages([{ id: "u3", role: "user", content: "Something else" }]);
    return { twice: twice.text, again: (await run(one, "counting")).text };
  },
  async joined() {
    const runId = `run ${crypto.randomUUID()}`;
    const one = agent();
    const told = run(one, "slow", { runId });
    await until(() => answer(one.messages));
    one.abortRun(); // the run goes on
    await told;
    const fresh = agent(JoiningAgent);
    await fresh.join(runId);
    const late = agent(JoiningAgent);
    await late.join(runId);
    const unknown = (await fetch(`${url}/runs/nobody`)).status;
    return { before: answer(one.messages), text: answer(fresh.messages), late: late.messages, unknown };
  },
};

const ended = Object.entries(stories).map(async ([story, tell]) => [story, await tell()]);
console.log(JSON.stringify(Object.fromEntries(await Promise.all(ended))));
