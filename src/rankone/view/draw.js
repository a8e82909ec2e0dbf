// Pictures: numbers as bars, strips, images and curves, in the colours of the page. Everything that is drawn
// can be pointed at (a tip says index and value) and is described for those who do not see it.
"use strict";

const tip = document.getElementById("tip");

function showTip(event, text) {
  if (!text) { tip.style.display = "none"; return; }
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6) + "px";
  tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 10) + "px";
}

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

// A vector as it was written by encode.py: signed steps of 1/127 of the largest, perhaps only the largest.
function decode(v) {
  const steps = new Int8Array(bytes(v.q).buffer), values = new Float64Array(v.n);
  for (let i = 0; i < steps.length; i++) values[v.at ? v.at[i] : i] = steps[i] / 127 * (v.max || 0);
  return values;
}

function short(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e5 ? String(+x.toPrecision(3)) : x.toExponential(1);
}
const percent = x => x === null || x === undefined ? "–" : short(100 * x) + " %";

const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
probe.canvas.width = probe.canvas.height = 1;
function colour(name) {
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}
const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));

function palette() {
  const page = colour("--page"), plus = colour("--plus"), minus = colour("--minus"), heat = colour("--heat");
  return {
    signed: t => mix(page, t < 0 ? minus : plus, Math.min(1, Math.abs(t))),
    heat: t => mix(page, heat, Math.min(1, Math.max(0, t))),
  };
}

function largest(values, most = 6) {
  return [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, most)
    .filter(i => values[i] !== 0);
}

function describe(what, values) {
  const top = largest(values, 5).map(i => `${i}: ${short(values[i])}`).join(", ");
  return `${what}, ${values.length} entries` + (top ? `; the largest are ${top}` : "; all are 0");
}

const MOST_PIXELS = 12000;  // of a canvas, in either direction

// Cells in rows and columns. `value(row, column)` is -1..1 (signed) or 0..1 (heat), `say` what the tip tells.
function cells(rows, columns, value, say, { heat = false, cell = 12, tall = cell, label = "", open = null } = {}) {
  const wide = Math.max(1, Math.min(cell, Math.floor(MOST_PIXELS / columns) || 1)), high = Math.max(1, Math.min(tall, Math.floor(MOST_PIXELS / rows) || 1));
  const canvas = document.createElement("canvas"), ratio = Math.min(2, devicePixelRatio || 1);
  canvas.width = Math.max(1, columns * wide * ratio); canvas.height = Math.max(1, rows * high * ratio);
  canvas.style.width = columns * wide + "px";
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", label);
  const context = canvas.getContext("2d"), paint = palette()[heat ? "heat" : "signed"];
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    context.fillStyle = `rgb(${paint(value(r, c)).join(",")})`;
    context.fillRect(c * wide * ratio, r * high * ratio, wide * ratio, high * ratio);
  }
  context.strokeStyle = `rgb(${colour("--line").join(",")})`;
  context.strokeRect(.5, .5, canvas.width - 1, canvas.height - 1);
  const at = event => {
    const box = canvas.getBoundingClientRect();
    return [Math.floor((event.clientY - box.top) / box.height * rows), Math.floor((event.clientX - box.left) / box.width * columns)];
  };
  const inside = ([r, c]) => r >= 0 && c >= 0 && r < rows && c < columns;
  canvas.onmousemove = event => { const p = at(event); showTip(event, inside(p) ? say(...p) : ""); };
  canvas.onmouseleave = event => showTip(event, "");
  if (open) {
    canvas.style.cursor = "pointer";
    canvas.onclick = event => { const p = at(event); if (inside(p)) { showTip(event, ""); open(...p); } };
  }
  return canvas;
}

// A vector: bars where there are few entries, an image where its shape is known, else a wrapped strip.
function vector(values, what, shape) {
  const n = values.length, most = values.reduce((m, x) => Math.max(m, Math.abs(x)), 1e-300);
  if (shape) {
    const [channels, height, width] = shape, gap = channels > 1 ? 1 : 0;
    const place = (r, c) => Math.floor(c / (width + gap)) * height * width + r * width + c % (width + gap);
    const hole = c => gap && c % (width + gap) === width;
    return cells(height, channels * (width + gap) - gap, (r, c) => hole(c) ? 0 : values[place(r, c)] / most,
      (r, c) => hole(c) ? "" : `entry ${place(r, c)}: ${short(values[place(r, c)])}`, { cell: 14, label: describe(what, values) });
  }
  if (n <= 160) return bars(values, what, most);
  const columns = Math.ceil(Math.sqrt(n * 3)), rows = Math.ceil(n / columns);
  return cells(rows, columns, (r, c) => r * columns + c < n ? values[r * columns + c] / most : 0,
    (r, c) => r * columns + c < n ? `entry ${r * columns + c}: ${short(values[r * columns + c])}` : "",
    { cell: 7, label: describe(what, values) });
}

function bars(values, what, most) {
  const n = values.length, width = Math.min(n * 26, 420), height = 90, middle = values.some(x => x < 0) ? height / 2 : height - 2;
  const scale = (values.some(x => x < 0) ? height / 2 : height) - 3;
  const canvas = document.createElement("canvas"), ratio = Math.min(2, devicePixelRatio || 1);
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.width = width + "px";
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", describe(what, values));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const paint = palette().signed, step = width / n;
  context.fillStyle = `rgb(${colour("--line").join(",")})`;
  context.fillRect(0, middle - .5, width, 1);
  values.forEach((x, i) => {
    context.fillStyle = `rgb(${paint(Math.sign(x)).join(",")})`;
    const size = Math.abs(x) / most * scale;
    context.fillRect(i * step + step * .12, x < 0 ? middle : middle - size, Math.max(1, step * .76), size);
  });
  canvas.onmousemove = event => {
    const box = canvas.getBoundingClientRect(), i = Math.floor((event.clientX - box.left) / box.width * n);
    showTip(event, i >= 0 && i < n ? `entry ${i}: ${short(values[i])}` : "");
  };
  canvas.onmouseleave = event => showTip(event, "");
  return canvas;
}

// Curves over a common x, with a legend, and a zoom by dragging (a double click goes back).
const LINES = ["#1257a8", "#c2410c", "#2f9e6e", "#8b5cf6", "#b45309", "#0e7490", "#be185d", "#4d7c0f"];
const LINES_DARK = ["#7ab8f5", "#fb923c", "#4ade80", "#c4b5fd", "#fbbf24", "#67e8f9", "#f9a8d4", "#bef264"];

function plot(holder, x, series, { log = false, xLabel = "", points = false, height = 260, range = null } = {}) {
  const dark = document.documentElement.dataset.theme === "dark", lines = dark ? LINES_DARK : LINES;
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const floor = log ? Math.max(...series.flatMap(([, y]) => y.filter(v => v > 0)), 0) * 1e-9 : -Infinity;
  const positive = y => y.map(v => v === null || v <= floor ? null : v);
  const decades = (_, axis, low, high) => {
    const first = Math.ceil(Math.log10(low)), count = Math.floor(Math.log10(high)) - first + 1, every = Math.ceil(count / 8);
    return [...Array(Math.max(0, count)).keys()].filter(i => i % every === 0).map(i => 10 ** (first + i));
  };
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const options = {
    width: Math.max(240, Math.min(holder.clientWidth || 640, 900)), height,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(range ? { range: () => range } : {}) } },
    axes: [{ ...axis, label: xLabel, labelSize: 18 }, { ...axis, size: 62, ...(log ? { splits: decades, filter: (_, splits) => splits } : {}), values: (_, ticks) => ticks.map(t => t === null ? "" : short(t)) }],
    series: [{ label: xLabel }, ...series.map(([label], i) => ({
      label, stroke: lines[i % lines.length], width: points ? 0 : 1.6, points: { show: points, size: 5, fill: lines[i % lines.length] },
      paths: points ? () => null : undefined, value: (_, v) => short(v), spanGaps: true,
    }))],
    legend: { live: !points, show: series.length > 1 },
  };
  const chart = new uPlot(options, [x, ...series.map(([, y]) => positive(y))], holder);
  holder.setAttribute("role", "img");
  return chart;
}
