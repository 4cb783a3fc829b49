// Agents of AG-UI against a gateway: node agui.mjs BASE; prints what each of them ended with.
import { EventSchemas } from "@ag-ui/core/schemas";
import { HttpAgent, verifyEvents } from "@ag-ui/client";
import { from, lastValueFrom, toArray } from "rxjs";
import { approve } from "./ag-ui.2.mjs";
import { JoiningAgent } from "./ag-ui.3.mjs";

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
const PAYS = { props: { tokenbus: { tools: ["pay"] } } };
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
      {
        forwardedProps: { model: `anthropic/${model}`, ...more.props },
        tools: more.tools ?? [],
        runId: more.runId,
        ...(more.resume ? { resume: more.resume } : {}),
      },
      { onEvent: ({ event }) => void events.push(event), onRunFailed: ({ error }) => void (failed = error) },
    )
    .catch((error) => (failed = error));
  await lastValueFrom(from(events).pipe(verifyEvents(false), toArray()));
  for (const event of events) EventSchemas.parse(event);
  return {
    interrupts: one.pendingInterrupts,
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
  async interrupted() {
    const one = agent();
    const asked = await run(one, "pays", PAYS);
    const [{ id }] = asked.interrupts;
    const resume = [{ interruptId: id, status: "resolved", payload: { approved: true, editedArgs: { amount: 400 } } }];
    return { asked, ...(await run(one, "pays", { ...PAYS, resume })) };
  },
  async denied() {
    const one = agent();
    const asked = await run(one, "pays-twice", PAYS);
    const [first, second] = asked.interrupts;
    const resume = [
      { interruptId: first.id, status: "resolved", payload: { approved: false, reason: "too dear" } },
      { interruptId: second.id, status: "cancelled" },
    ];
    return { asked, ...(await run(one, "pays-twice", { ...PAYS, resume })) };
  },
  async overtaken() {
    const one = agent();
    const asked = await run(one, "pays", PAYS);
    const [{ id }] = asked.interrupts;
    const wait = id.split(":").at(-1);
    const body = JSON.stringify({ type: "approval", decision: "deny", by: "bob" });
    await plainFetch(`${base}/runs/${asked.run}/waiting/${wait}`, { method: "POST", body });
    const resume = [{ interruptId: id, status: "resolved", payload: { approved: true } }];
    const runId = crypto.randomUUID();
    const late = await run(one, "pays", { ...PAYS, resume, runId });
    const fresh = agent(JoiningAgent);
    await fresh.join(runId);
    return { late, text: answer(fresh.messages) };
  },
  async replayed() {
    const one = agent();
    const asked = await run(one, "pays", PAYS);
    const resume = [{ interruptId: asked.interrupts[0].id, status: "resolved", payload: { approved: true } }];
    const body = JSON.stringify({ threadId: one.threadId, runId: "again", messages: [], tools: [], context: [], resume, forwardedProps: { model: "anthropic/pays" } });
    const post = async () => (await plainFetch(url, { method: "POST", body })).text();
    return { texts: [await post(), await post()].map((told) => told.includes("TOOL_CALL_RESULT") && told.includes("Paid 500.")) };
  },
  async approved() {
    const one = agent();
    await run(one, "pays", PAYS);
    await approve(one, { forwardedProps: { model: "anthropic/pays", ...PAYS.props } });
    return answer(one.messages);
  },
  async hostile() {
    const one = agent();
    const other = agent();
    const asked = await run(one, "pays", PAYS);
    const others = await run(other, "pays", PAYS);
    const input = (more) => ({ threadId: one.threadId, runId: crypto.randomUUID(), messages: one.messages, tools: [], context: [], forwardedProps: { model: "anthropic/pays" }, ...more });
    const post = async (more) => {
      const told = await plainFetch(url, { method: "POST", body: JSON.stringify(input(more)) });
      return [told.status, (await told.json()).error.code];
    };
    const saying = (interruptId, payload = { approved: true }) => post({ resume: [{ interruptId, status: "resolved", payload }] });
    return {
      unknown: [await saying(others.interrupts[0].id), await saying(`${asked.run}:9.9`), await saying("nobody"), await saying("🌤️")],
      invalid: [await saying(asked.interrupts[0].id, {}), await saying(asked.interrupts[0].id, { approved: 1 }), await saying(asked.interrupts[0].id, { approved: true, editedArgs: { amount: "x" } })],
      ignored: await post({ messages: [...one.messages, { id: "u9", role: "user", content: "And?" }] }),
    };
  },
  async in_place() {
    const tools = [{ name: "place", description: "Where the user is", parameters: { type: "object" } }];
    const one = agent();
    const asked = await run(one, "pays-in-place", { ...PAYS, tools });
    const resume = [{ interruptId: asked.interrupts[0].id, status: "resolved", payload: { approved: true } }];
    const called = await run(one, "pays-in-place", { ...PAYS, tools, resume });
    one.addMessage({ id: "t1", role: "tool", toolCallId: called.outcome.pendingToolCallIds[0], content: "Bonn" });
    return { asked, called, ...(await run(one, "pays-in-place", { ...PAYS, tools })) };
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
