// The run's events as they are on the bus. Only the lines in sight are in the page, however many there are.

import { count } from "../lib/format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib/html.js";
import { oneLine, visible } from "../lib/safe_text.js";

const LINE = 22;
const AROUND = 10;
const LINE_CHARACTERS = 400;
const SHOWN_CHARACTERS = 60_000;

export function RawEvents({ history, total, seq, onSeek }) {
  const { events } = history;
  const box = useRef(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(264);
  const [type, setType] = useState("");
  const types = [...history.byType.keys()].sort();
  const rows = type ? history.byType.get(type) ?? [] : events;
  const { length } = rows;
  const first = Math.max(0, Math.floor(top / LINE) - AROUND);
  const last = Math.min(length, Math.ceil((top + height) / LINE) + AROUND);

  useEffect(() => {
    const watcher = new ResizeObserver(() => setHeight(box.current?.clientHeight ?? 264));
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);

  const spacer = useRef(null);
  useLayoutEffect(() => {
    spacer.current.style.height = `${length * LINE}px`;
    for (const line of spacer.current.children) line.style.top = `${Number(line.dataset.index) * LINE}px`;
  });

  // The event at which the slider stands stays in sight, and so does the newest while the run is live.
  useLayoutEffect(() => {
    if (type || seq < 0) return;
    const at = seq * LINE;
    const view = box.current;
    if (at < view.scrollTop || at + LINE > view.scrollTop + view.clientHeight) view.scrollTop = at - view.clientHeight + 2 * LINE;
  }, [seq, total, type]);

  const lines = [];
  for (let index = first; index < last; index += 1) {
    const event = rows[index];
    lines.push(html`
      <button key=${event.seq} class="raw-line" data-index=${index} aria-current=${event.seq === seq ? "true" : undefined} onClick=${() => onSeek(event.seq)}>
        <span class="seq">${event.seq}</span><span class="type">${event.type}</span><span class="try" title=${`turn ${event.turn + 1}, attempt ${event.attempt} of the run`}>t${event.turn + 1}</span><span class="json">${summary(event)}</span>
      </button>`);
  }
  const chosen = events[seq];
  return html`
    <section class="card raw" aria-labelledby="raw-title">
      <h2 id="raw-title">Events <small class="mute" title="as on the bus, where turns count from 0">${count(total)}</small>
        <label><span class="sr">Type of event</span><select value=${type} onChange=${(event) => setType(event.target.value)}>
          <option value="">all types</option>${types.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label></h2>
      <div class="raw-split">
        <div ref=${box} class="raw-list" tabindex="0" role="group" aria-label="Events, one a line" onScroll=${(event) => setTop(event.target.scrollTop)}>
          <div ref=${spacer} class="raw-spacer">${lines}</div>
        </div>
        <pre class="raw-json" tabindex="0" aria-label="The event at which the slider stands" dir="ltr">${chosen ? pretty(chosen) : ""}</pre>
      </div>
    </section>`;
}

/** An event's own fields, without those that every line has or that say nothing. */
function summary(event) {
  const { type: _type, run: _run, seq: _seq, at: _at, turn: _turn, attempt: _attempt, depth: _depth, ...rest } = event;
  return oneLine(JSON.stringify(shorten(rest)).slice(0, LINE_CHARACTERS));
}

function shorten(fields) {
  const short = {};
  for (const [name, value] of Object.entries(fields)) {
    short[name] = typeof value === "string" && value.length > LINE_CHARACTERS ? `${value.slice(0, LINE_CHARACTERS)}…` : value;
  }
  return short;
}

function pretty(event) {
  const { at: _at, ...fields } = event;
  const text = JSON.stringify(fields, null, 2);
  return visible(text.length > SHOWN_CHARACTERS ? `${text.slice(0, SHOWN_CHARACTERS)}\n… ${count(text.length - SHOWN_CHARACTERS)} characters more` : text);
}
