// One run as it comes: its events, what the gateway says of it, and a signal that changes at most each 50 ms.

import { get, ROOT } from "../lib/api.js";
import { batch, signal } from "../lib/html.js";
import { openStream } from "../lib/stream.js";
import { RunHistory } from "./history.js";

const DRAW_MS = 50;
/** Of a frame, for events: the rest is for drawing them. */
const PIECE_MS = 6;
const OPENING_MS = 2000;
const SILENT_MS = 700;
const ASK_MS = 1000;

export class RunFeed {
  constructor(run) {
    this.run = run;
    this.path = `/runs/${encodeURIComponent(run)}`;
    this.history = new RunHistory();
    /** Changes when there is something to draw. */
    this.version = signal(0);
    this.info = signal(null);
    this.decisions = signal(null);
    this.problem = signal(null);
    this.state = signal({ name: "connecting" });
    /** What the gateway says that the run does, while no event tells it: it waits for a limit, or for its policies. */
    this.doing = signal(null);
    /** Whether the page has what there is: it shows itself whole, so nothing that comes later moves what is there. */
    this.ready = signal(false);
    this.heardAt = 0;
    this.waiting = [];
    this.drawnAt = 0;
    this.frame = 0;
    this.caughtUp = Infinity;
  }

  start(seesContent) {
    this.seesContent = seesContent;
    this.opening();
    this.stream = openStream({
      url: () => `${ROOT}${this.path}/events?after=${this.lastSeq()}`,
      silentMs: 60_000,
      onState: (state) => {
        this.state.value = state;
        if (state.name === "refused") this.load();
      },
      onEvent: (event) => this.take(event),
    });
    this.asking = setInterval(() => this.ask(), ASK_MS);
    this.ask();
  }

  /** Show the page once all is there that was there when it was opened, or with what came in time. */
  async opening() {
    this.patience = setTimeout(() => { this.ready.value = true; }, OPENING_MS);
    await this.load();
    this.loaded = true;
    this.showIfWhole();
  }

  showIfWhole() {
    if (this.loaded && (this.problem.value || this.history.last >= this.caughtUp)) this.ready.value = true;
  }

  /** While an open run is silent, ask what it does. */
  async ask() {
    if (this.history.head.end) clearInterval(this.asking);
    else if (!document.hidden && performance.now() - this.heardAt > SILENT_MS) {
      try {
        const doing = await get(`${this.path}/state`);
        if (!this.stopped) this.doing.value = doing;
      } catch {
        // The stream says that the gateway is away.
      }
    }
  }

  stop() {
    this.stopped = true;
    this.stream.close();
    clearInterval(this.asking);
    clearTimeout(this.patience);
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
  }

  lastSeq() {
    return this.waiting.length ? this.waiting[this.waiting.length - 1].seq : this.history.last;
  }

  /** What the gateway says of the run now: its request, what may be done, when its events were. */
  async load() {
    try {
      const info = await get(this.path);
      if (this.stopped) return;
      if (this.caughtUp === Infinity) this.caughtUp = info.last_seq;
      batch(() => {
        this.info.value = info;
        this.problem.value = null;
      });
    } catch (error) {
      if (!this.stopped && (this.history.last < 0 || error.status !== 0)) this.problem.value = error;
      return;
    }
    if (this.info.value.recorded) return; // a record has neither times nor decisions
    await Promise.all([this.loadTimes(), this.seesContent ? this.loadDecisions() : null]);
  }

  async loadTimes() {
    try {
      const { times } = await get(`${this.path}/times`);
      if (!this.stopped) await this.setTimes(new Map(times));
    } catch {
      // Without times the timeline counts events.
    }
  }

  async loadDecisions() {
    try {
      this.decisions.value = (await get(`${this.path}/decisions`)).decisions;
    } catch {
      this.decisions.value = [];
    }
  }

  /** Times of events that came before this page was open, as the topics keep them. A long run is told again in pieces,
   * between which the page draws. */
  async setTimes(times) {
    if (times.size === 0) return;
    this.times = times;
    const again = new RunHistory();
    for (let next = 0; next < this.history.events.length;) {
      for (const until = performance.now() + PIECE_MS; next < this.history.events.length && isBefore(until, next); next += 1) {
        const event = this.history.events[next];
        again.push(times.has(event.seq) ? { ...event, at: times.get(event.seq) } : event);
      }
      if (next < this.history.events.length) await new Promise((resolve) => setTimeout(resolve));
      if (this.stopped || this.times !== times) return;
    }
    this.history = again;
    this.version.value += 1;
  }

  take({ name, data }) {
    if (name === "gateway_error") return;
    const event = JSON.parse(data);
    if (!Number.isInteger(event.seq)) return;
    const at = this.times?.get(event.seq) ?? (event.seq > this.caughtUp ? Date.now() : undefined);
    if (at !== undefined) event.at = at;
    this.heardAt = performance.now();
    this.waiting.push(event);
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.onFrame());
  }

  onFrame() {
    const early = this.drawnAt + DRAW_MS - performance.now();
    if (early > 0) {
      this.timer = setTimeout(() => {
        this.frame = requestAnimationFrame(() => this.onFrame());
      }, early);
      return;
    }
    this.frame = 0;
    this.drawnAt = performance.now();
    this.draw();
  }

  draw() {
    if (!this.waiting.length) return;
    let taken = 0;
    for (const until = performance.now() + PIECE_MS; taken < this.waiting.length && isBefore(until, taken); taken += 1) {
      this.history.push(this.waiting[taken]);
    }
    this.waiting.splice(0, taken);
    this.version.value += 1;
    this.showIfWhole();
    if (this.waiting.length) this.frame = requestAnimationFrame(() => this.onFrame());
    else if (this.history.head.end) this.load();
  }
}

/** Whether there is time left; asks the clock seldom. */
function isBefore(until, count) {
  return count % 64 !== 63 || performance.now() < until;
}
