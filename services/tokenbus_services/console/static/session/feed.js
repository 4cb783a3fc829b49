// One session as it comes, and a signal that changes with each frame in which something came.

import { get, ROOT } from "../lib/api.js";
import { signal } from "../lib/html.js";
import { openStream } from "../lib/stream.js";
import { beginWith, empty, take } from "./fold.js";

const SILENT_MS = 60_000;
const OVER = new Set(["session_not_found", "session_replaced"]);

export class SessionFeed {
  constructor(name, tenant) {
    const query = tenant ? `?tenant=${encodeURIComponent(tenant)}` : "";
    this.path = (end = "") => `/sessions/${encodeURIComponent(name)}${end}${query}`;
    this.told = empty();
    this.version = signal(0);
    this.info = signal(null);
    this.problem = signal(null);
    this.state = signal({ name: "connecting" });
    this.came = [];
    this.frame = 0;
  }

  async start() {
    try {
      const { session, began_with: messages } = await get(this.path());
      if (this.stopped) return;
      beginWith(this.told, messages);
      this.info.value = session;
    } catch (error) {
      this.problem.value = error;
      return;
    }
    this.stream = openStream({
      url: () => ROOT + this.path("/events"),
      silentMs: SILENT_MS,
      onState: (state) => {
        this.state.value = state;
        if (state.name === "refused") this.over("The session is not there any more, or you may not see it.");
      },
      onEvent: (event) => this.take(event),
    });
  }

  stop() {
    this.stopped = true;
    this.stream?.close();
    cancelAnimationFrame(this.frame);
  }

  over(message) {
    this.problem.value = { message };
    this.stream.close();
  }

  take({ name, data }) {
    const event = JSON.parse(data);
    if (name === "gateway_error") {
      if (OVER.has(event.error?.code)) this.over("The session was deleted.");
      return;
    }
    this.came.push(event);
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const each of this.came.splice(0)) take(this.told, each);
      this.version.value += 1;
    });
  }
}
