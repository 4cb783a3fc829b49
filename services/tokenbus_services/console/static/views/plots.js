// Plots of the last hour. uPlot draws on a canvas, so its colours come from the page's, and change with its theme.

import { ms, short } from "../lib/format.js";
import { html, useEffect, useRef } from "../lib/html.js";
import { plots, theme } from "../lib/store.js";
import UPlot from "../vendor/uplot.js";

const HEIGHT = 132;
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

const PLOTS = [
  { id: "ends", title: "Runs a minute", unit: (value) => short(value), lines: [
    { label: "ended", colour: "--green", of: (point, step) => perMinute(point.runs_ended, step) },
    { label: "failed", colour: "--red", of: (point, step) => perMinute(point.runs_failed, step) },
  ] },
  { id: "open", title: "Open runs", unit: (value) => short(value), lines: [{ label: "open", colour: "--blue", of: (point) => point.open }] },
  { id: "chars", title: "Characters a second", unit: (value) => short(value), lines: [{ label: "characters", colour: "--violet", of: (point) => point.chars_per_s }] },
  { id: "first", title: "First byte, p50", unit: (value) => ms(value), lines: [{ label: "first byte", colour: "--cyan", of: (point) => point.first_byte_p50_ms }] },
];

function perMinute(value, step) {
  return value === null || value === undefined ? null : (value * 60) / step;
}

export function Plots() {
  const { points, step_s: step } = plots.value;
  return html`
    <div class="plots">
      ${PLOTS.map((plot) => html`<${Plot} key=${plot.id} plot=${plot} points=${points} step=${step} theme=${theme.value} />`)}
    </div>`;
}

function Plot({ plot, points, step, theme: chosen }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const data = [points.map((point) => point.at / 1000), ...plot.lines.map((line) => points.map((point) => line.of(point, step) ?? null))];
  const latest = useRef(data);
  latest.current = data;
  const last = points[points.length - 1];

  useEffect(() => {
    const place = box.current; // the box is gone when the page is, and what was asked for before may come after that
    const make = () => {
      drawn.current?.destroy();
      drawn.current = new UPlot(options(plot, place), latest.current, place);
    };
    make();
    const watcher = new ResizeObserver(() => drawn.current?.setSize({ width: place.clientWidth, height: HEIGHT }));
    watcher.observe(place);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    return () => {
      watcher.disconnect();
      scheme.removeEventListener("change", make);
      drawn.current.destroy();
      drawn.current = null;
    };
  }, [chosen]);
  useEffect(() => drawn.current?.setData(latest.current), [points]);

  const values = plot.lines.map((line) => `${line.label} ${last ? plot.unit(line.of(last, step)) : "–"}`);
  return html`
    <section class="card plot" aria-label=${`${plot.title}: now ${values.join(", ")}`}>
      <h2>${plot.title}
        ${plot.lines.map((line) => html`<small class=${`key c${line.colour}`}><i></i>${line.label} <b>${last ? plot.unit(line.of(last, step)) : "–"}</b></small>`)}</h2>
      <div ref=${box} class="plot-box" aria-hidden="true"></div>
    </section>`;
}

function options(plot, box) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--mute"), font: "11px system-ui", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const last = Date.now() / 1000;
  return {
    width: box.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { show: false } },
    scales: { x: { range: (_plot, from, to) => [Math.min(from ?? last, (to ?? last) - 600), to ?? last] }, y: { range: (_plot, _from, to) => [0, Math.max(1, (to ?? 0) * 1.15)] } },
    axes: [
      { ...axis, space: 70, size: 26, values: (_plot, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" })) },
      { ...axis, size: 52, space: 34, incrs: WHOLE_STEPS, values: (_plot, ticks) => ticks.map(plot.unit) },
    ],
    series: [{}, ...plot.lines.map((line) => ({ label: line.label, stroke: colour(line.colour), fill: `${colour(line.colour)}22`, width: 1.5, points: { show: false } }))],
  };
}
