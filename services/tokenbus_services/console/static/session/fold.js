// A session as a person reads it, after any number of its events and of its runs'. Pure: no clock, no page.

import { apply, initial } from "../run/reducer.js";

export function empty() {
  return {
    /** What is shown, in order: messages, parts of runs, notes. */
    entries: [],
    /** Messages that were accepted and have not taken effect, by their id. */
    waiting: new Map(),
    /** States of runs (see `reducer.js`), by id. */
    runs: new Map(),
    config: null,
    open: null,
  };
}

const RETURNED = {
  busy: "the model was speaking",
  withdrawn: "it was taken back",
  queue_full: "too many messages waited",
  heard_too_far: "it said that more was heard than was said",
  not_waiting: "it did not wait any more",
  nothing_open: "nothing was open",
  newer_run: "a newer run was open",
  exists: "the session was there already",
  rejected: "a policy did not let it pass",
};

/** What the session began with: a list of messages. */
export function beginWith(state, messages) {
  for (const { role, participant, content } of messages) {
    const text = textOf(content);
    if (text && role !== "tool") state.entries.push({ kind: "said", author: participant ?? role, text, answer: role === "assistant" });
  }
}

/** Change the state by the next event. */
export function take(state, event) {
  if (event.session_seq === undefined) ofRun(state, event);
  else OF_SESSION[event.type]?.(state, event);
}

const OF_SESSION = {
  configured(state, event) {
    const before = modelOf(state.config);
    state.config = event.item;
    const model = modelOf(event.item);
    if (before !== null && before !== model) note(state, event, `from now on ${model}`);
  },

  appended(state, event) {
    const { item } = event;
    if (item.type !== "message") return;
    const how = item.when_busy ?? state.config?.when_busy ?? "enqueue";
    state.waiting.set(event.append, {
      append: event.append,
      author: item.participant ?? "user",
      text: textOf(item.content),
      hidden: event.hidden ?? 0,
      steers: how === "steer" && state.open !== null,
      at: event.at_ms,
    });
  },

  delivered(state, event) {
    const message = state.waiting.get(event.append);
    if (!message) return;
    state.waiting.delete(event.append);
    const steered = event.turn > 0;
    state.entries.push({ kind: "said", ...message, run: event.run, steered, waited_ms: event.at_ms - message.at });
    open(state, event.run);
  },

  returned(state, event) {
    const message = state.waiting.get(event.append);
    const why = event.problem ?? RETURNED[event.reason] ?? event.reason;
    // Of what policies reject, the session never has the text.
    if (!message && event.reason === "rejected") note(state, event, `a message was returned: ${why}`);
    if (!message) return;
    state.waiting.delete(event.append);
    state.entries.push({ kind: "returned", ...message, why });
  },

  run_ended(state, event) {
    state.open = null;
    if (event.status === "lost") note(state, event, "nothing is left of this answer");
  },
};

/** The run speaks from here on, behind what was said last. */
function open(state, run) {
  const before = state.entries.findLast((entry) => entry.kind === "run" && entry.run === run);
  const from = state.runs.get(run)?.blocks.length ?? 0;
  if (before && before.to === null) before.to = from;
  state.entries.push({ kind: "run", run, from, to: null });
  state.open = run;
}

function ofRun(state, event) {
  if (!state.runs.has(event.run)) {
    state.runs.set(event.run, initial());
    if (!state.entries.some((entry) => entry.kind === "run" && entry.run === event.run)) open(state, event.run);
  }
  apply(state.runs.get(event.run), event);
}

function note(state, event, text) {
  state.entries.push({ kind: "note", text, at: event.at_ms });
}

export function modelOf(config) {
  return config ? `${config.request?.provider ?? "?"}/${config.request?.model ?? "?"}` : null;
}

function textOf(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? `[${part.type}]`).join(" ");
}
