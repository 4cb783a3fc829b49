// A stream of server-sent events that opens again by itself. `EventSource` gives up for ever on any status but 200,
// so a restart of the gateway would end every page; this one backs off, and goes on after the last id it had.

import { headersOf } from "./api.js";
import { SseParser } from "./sse_parser.js";

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 8000;
const ANSWER_MS = 30_000;

/**
 * Read `url()` until `close()`. `onState` hears "connecting", "open", "waiting" (with `retry_at`), "paused", "refused"
 * (with `status`) and "done".
 */
export function openStream({ url, onEvent, onState, silentMs }) {
  let controller = null;
  let timer = 0;
  let watchdog = 0;
  let pause = FIRST_PAUSE_MS;
  let lastId = null;
  let closed = false;

  function state(name, more = {}) {
    if (!closed) onState({ name, ...more });
  }

  function alive(within) {
    clearTimeout(watchdog);
    const own = controller;
    watchdog = setTimeout(() => own?.abort(), within);
  }

  async function read() {
    const own = new AbortController();
    controller = own;
    clearTimeout(timer);
    state("connecting");
    alive(Math.min(silentMs, ANSWER_MS));
    try {
      const headers = headersOf("text/event-stream");
      if (lastId !== null) headers["last-event-id"] = lastId;
      const answer = await fetch(url(), { headers, credentials: "same-origin", cache: "no-store", signal: own.signal });
      if (answer.status === 204) return stop("done");
      if ([400, 401, 403, 404, 410].includes(answer.status)) return stop("refused", { status: answer.status });
      if (answer.status !== 200) throw new Error(`status ${answer.status}`);
      state("open");
      alive(silentMs);
      const parser = new SseParser((event) => {
        if (event.id !== null) lastId = event.id;
        pause = FIRST_PAUSE_MS;
        onEvent(event);
      });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (own !== controller || closed) return undefined;
        if (done) break;
        alive(silentMs);
        parser.feed(value);
      }
    } catch {
      // An abort of ours, or the network's: both end here, and the state below says which.
    }
    if (closed || own !== controller) return undefined;
    return again();
  }

  function again() {
    clearTimeout(watchdog);
    if (document.hidden) return undefined;
    const wait = pause * (0.75 + Math.random() / 2);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    state("waiting", { retry_at: Date.now() + wait });
    timer = setTimeout(read, wait);
    return undefined;
  }

  function stop(name, more) {
    state(name, more);
    close();
  }

  function drop() {
    const own = controller;
    controller = null;
    clearTimeout(timer);
    clearTimeout(watchdog);
    own?.abort();
  }

  function onVisibility() {
    if (closed) return;
    drop();
    if (document.hidden) state("paused");
    else {
      pause = FIRST_PAUSE_MS;
      read();
    }
  }

  function onOnline() {
    if (closed || document.hidden) return;
    drop();
    read();
  }

  function close() {
    if (closed) return;
    closed = true;
    drop();
    document.removeEventListener("visibilitychange", onVisibility);
    window.removeEventListener("online", onOnline);
  }

  document.addEventListener("visibilitychange", onVisibility);
  window.addEventListener("online", onOnline);
  if (document.hidden) state("paused");
  else read();
  return { close };
}
