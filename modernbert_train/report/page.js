// The page of runs: a table that is the legend of all charts, and charts by uPlot. What comes from runs is shown as text
// nodes only. What a reader has chosen stands in the address behind #, so that a view can be sent.
"use strict";
const doc = JSON.parse(document.getElementById("data").textContent);
const runs = []; // in the order in which they joined
const COLOURS = 7, DASHES = [[], [8, 4], [11, 3, 3, 3], [3, 3]];
const SMOOTHING = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]; // shares of the run's steps
const AXES = { tokens: "tokens seen", step: "steps", seconds: "training time" };
const MOST = 10; // lines that are named at once
const NEAR = 30; // px within which a line is meant
const POLL = 3000; // ms between two questions to the server
const FEW = 6; // runs whose settings stand in a table of their own

// ---- small things

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function trimmed(number, digits) {
  return String(Number(number.toPrecision(digits)));
}

function scaled(value, digits) {
  const units = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]];
  for (const [size, name] of units) if (Math.abs(value) >= size) return trimmed(value / size, digits) + name;
  return trimmed(value, digits);
}

function duration(seconds) {
  if (seconds < 60) return trimmed(seconds, 3) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + " min";
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return hours + " h" + (minutes % 60 ? " " + (minutes % 60) + " min" : "");
  return Math.floor(hours / 24) + " d" + (hours % 24 ? " " + (hours % 24) + " h" : "");
}

function shown(value, form, digits) {
  if (value === null || value === undefined || !isFinite(value)) return "none";
  if (form === "percent") return trimmed(100 * value, digits) + " %";
  if (form === "count") return scaled(value, digits);
  if (form === "bytes") return scaled(value, digits) + "B";
  if (form === "tokens") return scaled(value, digits);
  if (form === "seconds") return duration(value);
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
  return form === "number" && digits > 3 ? value.toFixed(3) : trimmed(value, digits);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

// ---- what the reader has chosen

const state = { x: "tokens", smooth: 3, zoom: null, hide: new Set(), pin: null, q: "", sort: null, theme: "auto", flip: new Set(), sample: null };

function readState() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.get("x") in AXES) state.x = asked.get("x");
  const smooth = Number(asked.get("smooth") ?? state.smooth);
  if (Number.isInteger(smooth) && smooth >= 0 && smooth < SMOOTHING.length) state.smooth = smooth;
  const zoom = (asked.get("zoom") ?? "").split("_").map(Number);
  if (zoom.length === 2 && zoom.every(isFinite) && zoom[0] < zoom[1]) state.zoom = zoom;
  state.hide = new Set(asked.getAll("hide"));
  state.flip = new Set(asked.getAll("log"));
  state.pin = asked.get("run");
  state.q = asked.get("q") ?? "";
  const [head, order] = [asked.get("sort"), asked.get("order")];
  if (head) state.sort = { head, up: order !== "down" };
  if (["light", "dark"].includes(asked.get("theme"))) state.theme = asked.get("theme");
}

function keepState() {
  const said = new URLSearchParams();
  if (state.x !== "tokens") said.set("x", state.x);
  if (state.smooth !== 3) said.set("smooth", state.smooth);
  if (state.zoom) said.set("zoom", state.zoom.map((x) => trimmed(x, 8)).join("_"));
  for (const name of state.hide) said.append("hide", name);
  for (const key of state.flip) said.append("log", key);
  if (state.pin !== null) said.set("run", state.pin);
  if (state.q) said.set("q", state.q);
  if (state.sort) { said.set("sort", state.sort.head); if (!state.sort.up) said.set("order", "down"); }
  if (state.theme !== "auto") said.set("theme", state.theme);
  history.replaceState(null, "", "#" + said);
}

// ---- the theme: the rules for dark pages stand in the style sheet once, and are switched on or off

const darkScreen = matchMedia("(prefers-color-scheme: dark)");
const darkRules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])
  .filter((rule) => rule instanceof CSSMediaRule && rule.media.mediaText.includes("prefers-color-scheme: dark"));
let palette = {};

function isDark() {
  return state.theme === "auto" ? darkScreen.matches : state.theme === "dark";
}

function applyTheme() {
  for (const rule of darkRules) rule.media.mediaText = isDark() ? "all" : "not all";
  document.documentElement.style.colorScheme = isDark() ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  palette = {};
  for (const name of ["ink", "soft", "hair", "axis", "card", "phase", "again", "bad", "base"]) palette[name] = style.getPropertyValue("--" + name).trim();
  palette.runs = Array.from({ length: COLOURS }, (_, i) => style.getPropertyValue("--r" + i).trim());
}

function look(number) { // neighbours differ in colour and dashes both
  const around = COLOURS * DASHES.length;
  return { colour: palette.runs[(number + Math.floor(number / around)) % COLOURS], dash: runs.length > 1 ? DASHES[number % DASHES.length] : [] };
}

// ---- the runs

function take(index, update) {
  const run = runs[index] ?? (runs[index] = { number: index, columns: {}, means: {} });
  for (const part of ["columns", "means"]) {
    const before = run[part];
    run[part] = {};
    const names = Object.keys(update[part]);
    if (update.first) for (const name of Object.keys(before)) if (!names.includes(name)) names.push(name);
    for (const name of names) {
      const old = update.first ? (before[name] ?? Array(update.first).fill(null)).slice(0, update.first) : [];
      run[part][name] = update.first ? old.concat(update[part][name] ?? []) : update[part][name];
    }
  }
  const { columns, means, ...about } = update;
  Object.assign(run, about, { text: null, drawn: new Map(), places: new Map() });
}

function placesOf(run, curve) { // of the values of a curve, or of the steps, on the axis that is chosen
  if (!curve) return run.columns[state.x] ?? [];
  if (curve[state.x]) return curve[state.x];
  const steps = run.columns.step ?? [], seconds = run.columns.seconds ?? [];
  return curve.step.map((step) => (steps.length ? seconds[nearest(steps, step)] : 0));
}

function smoothed(values, means, steps, share, total) {
  if (!share || values.length < 3) return values;
  // each value stands for the steps since the one before it; the mean is over whole values in the window
  const half = Math.max(share * total, 9) / 2, count = values.length;
  const sums = new Float64Array(count + 1), weights = new Float64Array(count + 1);
  for (let i = 0; i < count; i++) {
    const value = (means ?? values)[i], weight = value === null ? 0 : i && means ? Math.max(1, steps[i] - steps[i - 1]) : 1;
    sums[i + 1] = sums[i] + (value ?? 0) * weight;
    weights[i + 1] = weights[i] + weight;
  }
  const averages = new Array(count);
  let low = 0, high = 0;
  for (let i = 0; i < count; i++) {
    const reach = Math.min(half, steps[i] - steps[0]); // the window begins with one step and grows
    while (steps[low] < steps[i] - reach) low++;
    while (high < count && steps[high] <= steps[i] + reach) high++;
    const weight = weights[high] - weights[low];
    averages[i] = values[i] === null || !weight ? null : (sums[high] - sums[low]) / weight;
  }
  return averages;
}

function isShown(run) {
  return !state.hide.has(run.name) && matches(run);
}

function matches(run) {
  if (!state.q.trim()) return true;
  run.text ??= [run.name, "state=" + run.state, ...Object.entries(run.figures).map(([head, [, text]]) => head + "=" + text),
    ...Object.entries(run.settings).map(([key, value]) => key + "=" + value)].join("\n").toLowerCase();
  return state.q.toLowerCase().split(/\s+/).filter(Boolean).every((word) => run.text.includes(word));
}

function differing() { // keys whose values are not the same in all runs
  const keys = [], described = runs.filter((run) => Object.keys(run.settings).length);
  if (described.length < 2) return [];
  for (const key of new Set(described.flatMap((run) => Object.keys(run.settings))))
    if (key !== "name" && key !== "runs_folder" && new Set(described.map((run) => run.settings[key])).size > 1) keys.push(key);
  return keys;
}

// ---- the frame of the page

const out = (name) => document.querySelector(name);
let charts = []; // what is drawn, see `plan`
let hot = null; // the run that is pointed at
let observer = null;

function build() {
  const choice = (label, id, options, change) =>
    make("label", {}, label + " ", make("select", { id, onchange: (event) => { change(event.target.value); } },
      ...Object.entries(options).map(([value, text]) => make("option", { value, text }))));
  document.querySelector("main").replaceChildren(
    make("header", {}, make("h1", { id: "title" }), make("p", { id: "note" })),
    make("div", { class: "bar box", role: "toolbar", "aria-label": "How the charts are drawn" },
      choice("Over", "axis", AXES, (value) => { state.x = value; state.zoom = null; redraw(); }),
      make("label", {}, "Smoothing ", make("input", { id: "smooth", type: "range", min: 0, max: SMOOTHING.length - 1, step: 1,
        oninput: (event) => { state.smooth = Number(event.target.value); redraw(); } }), make("output", { id: "smoothness" })),
      make("button", { id: "whole", type: "button", text: "Whole axis", hidden: true, onclick: () => { state.zoom = null; redraw(); } }),
      make("button", { id: "csv", type: "button", text: "CSV", title: "Download what the charts are drawn from, of the runs that are shown", onclick: download }),
      choice("Theme", "theme", { auto: "as the system", light: "light", dark: "dark" }, (value) => { state.theme = value; applyTheme(); table(); redraw(); }),
      make("output", { id: "live", "aria-live": "polite" })),
    make("div", { id: "warnings" }),
    make("details", { class: "box runs", open: true }, make("summary", { id: "count" }),
      make("div", { class: "tools" },
        make("input", { type: "search", id: "filter", "aria-label": "Filter the runs", placeholder: "Filter by name or key=value",
          oninput: (event) => { state.q = event.target.value; table(); redraw(); } }),
        make("button", { type: "button", text: "Show all", "data-all": "show", onclick: () => { for (const run of runs) if (matches(run)) state.hide.delete(run.name); table(); redraw(); } }),
        make("button", { type: "button", text: "Hide all", "data-all": "hide", onclick: () => { for (const run of runs) if (matches(run)) state.hide.add(run.name); table(); redraw(); } }),
        make("output", { id: "shown" })),
      make("div", { class: "wide" }, make("table", { id: "runs" }, make("thead"), make("tbody")))),
    make("div", { class: "charts", id: "charts" }),
    make("div", { id: "settings" }),
    make("div", { id: "samples" }),
    make("div", { id: "data-of-run" }),
    make("div", { id: "about" }),
    make("p", { class: "note", id: "points" }));
  document.body.append(make("div", { class: "tip", id: "tip", hidden: true }));
}

// ---- the table of the runs: the legend

function key(run) {
  const canvas = make("canvas", { class: "key", width: 68, height: 12, "aria-hidden": "true" });
  const pen = canvas.getContext("2d"), { colour, dash } = look(run.number);
  Object.assign(pen, { strokeStyle: colour, lineWidth: 4 });
  pen.setLineDash(dash.map((length) => 2 * length));
  pen.beginPath();
  pen.moveTo(0, 6);
  pen.lineTo(68, 6);
  pen.stroke();
  return canvas;
}

function columnsOfTable() {
  const live = doc.live ? [{ head: "State", of: (run) => [run.state, run.state] }] : [];
  const heads = new Set(runs.flatMap((run) => Object.keys(run.figures)));
  for (const head of ["MFU", "Data wait"]) if (runs.every((run) => (run.figures[head] ?? [null])[0] === null)) heads.delete(head);
  const figures = [...heads].map((head) => ({ head, of: (run) => run.figures[head] ?? [null, ""] }));
  const settings = runs.length > FEW ? differing().map((head) => ({ head, key: true, of: (run) => [run.settings[head] ?? null, run.settings[head] ?? "absent"] })) : [];
  return [{ head: "Run", of: (run) => [run.name, run.name] }, ...live, ...figures, ...settings];
}

function inOrder(columns) {
  const column = state.sort && columns.find((each) => each.head === state.sort.head);
  if (!column) return [...runs];
  const missing = (value) => value === null || value === "";
  return [...runs].sort((a, b) => {
    const [x, y] = [column.of(a)[0], column.of(b)[0]];
    if (missing(x) || missing(y)) return missing(x) - missing(y); // last, whichever way
    const [p, q] = [Number(x), Number(y)];
    const order = isNaN(p) || isNaN(q) ? isNaN(p) - isNaN(q) || String(x).localeCompare(String(y), "en", { numeric: true }) : p - q;
    return state.sort.up ? order : -order;
  });
}

function table() {
  const columns = columnsOfTable();
  const losses = runs.map((run) => (run.figures["Validation loss"] ?? [null])[0]).filter((loss) => loss !== null);
  const best = losses.length ? Math.min(...losses) : null;
  const focused = document.activeElement?.closest?.("#runs") ? document.activeElement.dataset.focus : null;
  out("#runs thead").replaceChildren(make("tr", {}, ...columns.map(({ head, key: isKey }) => {
    const sorted = state.sort?.head === head ? (state.sort.up ? "ascending" : "descending") : "none";
    return make("th", { "aria-sort": sorted, class: isKey ? "key-name" : null, scope: "col" }, make("button", { type: "button", text: head, "data-focus": "head " + head, onclick: () => {
      state.sort = { head, up: !(state.sort?.head === head && state.sort.up) };
      table();
      keepState();
    } }));
  })));
  out("#runs tbody").replaceChildren(...inOrder(columns).map((run) => {
    const off = state.hide.has(run.name);
    const box = make("input", { type: "checkbox", "aria-label": "draw " + run.name, "data-focus": "box " + run.number });
    box.checked = !off;
    box.addEventListener("change", () => { box.checked ? state.hide.delete(run.name) : state.hide.add(run.name); table(); redraw(); });
    const name = make("button", { type: "button", "aria-pressed": String(state.pin === run.name), title: run.name, "data-focus": "name " + run.number, onclick: () => {
      state.pin = state.pin === run.name ? null : run.name;
      state.sample = null;
      table();
      focusOn(null);
      about();
      keepState();
    } }, key(run), make("span", { text: run.name }));
    const cells = columns.slice(1).map(({ head, of, key: isKey }) => {
      const [value, text] = of(run), isBest = head === "Validation loss" && value !== null && value === best && runs.length > 1;
      const short = isKey && text.length > 48 ? text.slice(0, 31) + "…" + text.slice(-16) : text;
      return make("td", { title: short === text ? null : text }, isBest ? make("b", { text: short }) : short);
    });
    const row = make("tr", { "data-run": run.number, class: off ? "off" : state.pin === run.name ? "on" : null }, make("th", { scope: "row" }, make("span", { class: "name" }, box, name)), ...cells);
    row.hidden = !matches(run);
    row.addEventListener("pointerenter", () => focusOn(isShown(run) ? run : null));
    row.addEventListener("pointerleave", () => focusOn(null));
    return row;
  }));
  if (focused) [...document.querySelectorAll("#runs [data-focus]")].find((each) => each.dataset.focus === focused)?.focus();
  const count = runs.filter(isShown).length;
  out("#shown").textContent = `${count} of ${runs.length} shown`;
  out("#count").textContent = runs.length === 1 ? "1 run" : `${runs.length} runs`;
}

// ---- which charts there are

function plan() {
  const planned = [];
  for (const chart of doc.charts) {
    const having = runs.filter((run) => chart.column in run.columns);
    if (chart.column === "rank_flops_per_second" && runs.some((run) => "mfu" in run.columns)) continue;
    if (having.length) planned.push({ ...chart, id: chart.column });
    if (chart.column === "loss")
      for (const term of new Set(runs.flatMap((run) => Object.keys(run.columns).filter((name) => name.startsWith("loss/")))))
        planned.push({ ...chart, column: term, id: term, title: "Training loss of the term " + term.slice(5) });
  }
  const curves = [];
  for (const run of runs)
    for (const curve of run.curves)
      if (!curves.some((each) => each.id === curve.title)) curves.push({ ...curve, id: curve.title, curve: curve.title, zero: false, smooth: false });
  planned.splice(1, 0, ...curves.slice(0, 2));
  return [...planned, ...curves.slice(2, 26)];
}

function lines(chart) { // what a chart draws: places and values of each run that is shown
  const visible = runs.filter(isShown), drawnLines = [];
  const add = (run, xs, ys, style) => drawnLines.push({ run, xs, ys, ...style });
  for (const run of visible) {
    const key = [chart.id, state.x, state.smooth, visible.length < 4].join("|");
    let cached = run.drawn.get(chart.id);
    if (cached?.key !== key) {
      cached = { key, of: [] };
      if (chart.curve) {
        const curve = run.curves.find((each) => each.title === chart.curve);
        if (curve?.step.length) {
          const xs = placesOf(run, curve);
          cached.of.push([xs, curve.value, { points: curve.step.length < 60 }]);
          if (curve.guess.length && visible.length === 1) cached.of.push([xs, curve.guess, { guess: true }]);
        }
      } else if (chart.column in run.columns) {
        const xs = placesOf(run), raw = run.columns[chart.column], share = chart.smooth ? SMOOTHING[state.smooth] : 0;
        if (share && visible.length < 4) cached.of.push([xs, raw, { faint: true }]);
        cached.of.push([xs, smoothed(raw, run.means[chart.column], run.columns.step, share, run.total), {}]);
      }
      run.drawn.set(chart.id, cached);
    }
    for (const [xs, ys, style] of cached.of) if (xs.length) add(run, xs, ys, style);
  }
  return drawnLines;
}

function isLog(chart) {
  return chart.log !== state.flip.has(chart.id);
}

function wholeAxis() {
  let end = 0;
  for (const run of runs.filter(isShown)) {
    const xs = placesOf(run);
    if (xs.length) end = Math.max(end, xs[xs.length - 1]);
    for (const curve of run.curves) { const places = placesOf(run, curve); if (places.length) end = Math.max(end, places[places.length - 1]); }
  }
  return [0, end || 1];
}

function rangeOf(chart, drawn, low, high) { // of the values between two places
  let least = Infinity, most = -Infinity;
  const log = isLog(chart);
  for (const { xs, ys, faint } of drawn) {
    if (faint && drawn.length > 2) continue;
    for (let i = 0; i < xs.length; i++) {
      const y = ys[i];
      if (y === null || xs[i] < low || xs[i] > high || (log && y <= 0)) continue;
      if (y < least) least = y;
      if (y > most) most = y;
    }
  }
  if (least > most) return log ? [0.1, 1] : [0, 1];
  if (log) {
    if (least === most) { least /= 1.2; most *= 1.2; }
    const margin = Math.pow(most / least, 0.04);
    return [least / margin, most * margin];
  }
  if (chart.zero) least = Math.min(0, least);
  const margin = (most - least) * 0.05 || Math.abs(most) * 0.1 || 1;
  return [chart.zero && least === 0 ? 0 : least - margin, most + margin];
}

// ---- drawing

function redraw() {
  keepState();
  controls();
  const planned = plan(), place = out("#charts"), before = new Map(charts.map((each) => [each.id, each]));
  if (planned.map((each) => each.id).join("\n") !== charts.map((each) => each.id).join("\n")) {
    observer?.disconnect();
    for (const each of charts) each.plot?.destroy();
    observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = charts.find((each) => each.figure === entry.target);
        if (!chart) continue;
        chart.visible = entry.isIntersecting;
        if (chart.visible && chart.stale) draw(chart);
      }
    }, { rootMargin: "200px" });
    charts = planned.map((chart) => frame({ ...chart, visible: before.get(chart.id)?.visible ?? false }));
    place.replaceChildren(...charts.map((chart) => chart.figure));
    for (const chart of charts) observer.observe(chart.figure);
  } else charts.forEach((chart, i) => Object.assign(chart, planned[i]));
  for (const chart of charts) { chart.stale = true; if (chart.visible) draw(chart); }
  settings();
}

function frame(chart) {
  const name = "log " + chart.id;
  chart.logBox = make("input", { type: "checkbox", "aria-label": "logarithmic axis of " + chart.title, onchange: () => {
    state.flip.has(chart.id) ? state.flip.delete(chart.id) : state.flip.add(chart.id);
    keepState();
    draw(chart);
  } });
  chart.where = make("output", { class: "where" });
  chart.plotAt = make("div", { class: "plot-at" });
  chart.figure = make("figure", { class: "box", "data-chart": chart.id },
    make("figcaption", {}, make("h2", { text: chart.title }), chart.where, make("label", { class: "log", title: name }, chart.logBox, " log")), chart.plotAt);
  return chart;
}

function draw(chart) {
  chart.stale = false;
  chart.logBox.checked = isLog(chart);
  const drawn = (chart.drawn = lines(chart)), [low, high] = state.zoom ?? wholeAxis();
  const width = chart.plotAt.clientWidth, height = chart === charts[0] ? Math.max(260, Math.min(420, innerHeight * 0.42)) : 220;
  chart.plot?.destroy();
  chart.plot = null;
  if (!drawn.some(({ ys }) => ys.some((y) => y !== null))) {
    chart.plotAt.replaceChildren(make("p", { class: "note", text: runs.some(isShown) ? "Nothing recorded yet" : "No run is shown" }));
    return;
  }
  chart.plotAt.replaceChildren();
  const range = rangeOf(chart, drawn, low, high), log = isLog(chart), wide = runs.filter(isShown).length > 20 ? 1.25 : 1.75;
  const series = drawn.map(({ run, faint, guess, points }) => {
    const { colour, dash } = look(run.number);
    return {
      label: run.name, stroke: faint ? colour + "55" : guess ? palette.base : colour, width: faint ? 1 : wide, dash: guess ? [6, 5] : dash,
      facets: [{ scale: "x", auto: false }, { scale: "y", auto: false }], paths: linePaths,
      points: { show: Boolean(points), size: 6, fill: colour }, spanGaps: false,
    };
  });
  const tick = { stroke: palette.soft, font: "12px system-ui, sans-serif", ticks: { stroke: palette.axis, width: 1, size: 4 }, grid: { stroke: palette.hair, width: 1 } };
  const form = state.x === "seconds" ? "seconds" : "tokens";
  chart.plot = new uPlot({
    mode: 2, width, height, padding: [20, 12, 0, 0], legend: { show: false }, pxAlign: 0,
    scales: { x: { time: false, auto: false, range: () => state.zoom ?? wholeAxis() }, y: { auto: false, distr: log ? 3 : 1, range: () => range } },
    axes: [
      { ...tick, size: 28, space: 70, ...(state.x === "seconds" ? { incrs: [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800] } : {}), values: (_, found) => found.map((x) => shown(x, form, 4)) },
      { ...tick, size: 62, space: 34, values: (_, ticks) => ticks.map((y) => (y === null ? "" : shown(y, chart.form, 3))), ...(log ? { filter: (_, ticks) => ticks, splits: () => logTicks(range) } : {}) },
    ],
    series: [{}, ...series],
    cursor: { points: { show: false }, dataIdx: () => null, drag: { x: true, y: false, setScale: false, dist: 5 }, sync: { key: "runs", scales: ["x", null] }, y: true },
    hooks: {
      setSelect: [(plot) => {
        const { left, width: wide } = plot.select;
        if (wide < 5) return;
        state.zoom = [plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")];
        setTimeout(redraw);
      }],
      setCursor: [(plot) => follow(chart, plot)],
      draw: [(plot) => marks(chart, plot)],
    },
  }, [null, ...drawn.map(({ xs, ys }) => [xs, log ? ys.map((y) => (y > 0 ? y : null)) : ys])], chart.plotAt);
  chart.plot.over.addEventListener("dblclick", () => { state.zoom = null; redraw(); });
  chart.plot.over.addEventListener("pointerleave", () => { chart.pointed = false; out("#tip").hidden = true; focusOn(null); });
  chart.plot.over.addEventListener("pointerenter", () => { chart.pointed = true; });
  if (focus()) emphasise(chart);
}

const straight = uPlot.paths.linear();
function linePaths(plot, series, first, last) {
  return last < first ? null : straight(plot, series, first, last);
}

function logTicks([low, high]) {
  if (!(low > 0 && high > low && Number.isFinite(high / low)) || low + (high - low) / 1000 === low) return [];
  const ticks = [], decades = Math.log10(high / low);
  if (decades < 0.4) { // so little of a decade is as good as linear
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough);
    for (let y = Math.ceil(low / step) * step; y <= high; y += step) ticks.push(Number(y.toPrecision(6)));
    return ticks;
  }
  const digits = decades > 3 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 6, 8], every = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    if (power % every === 0) for (const digit of digits) { const y = digit * 10 ** power; if (y >= low && y <= high) ticks.push(Number(y.toPrecision(3))); }
  return ticks;
}

function marks(chart, plot) { // phases, restarts, faults and losses that are no numbers
  const pen = plot.ctx, { left, top, width, height } = plot.bbox, scale = devicePixelRatio || 1;
  const at = (x) => plot.valToPos(x, "x", true), inside = (x) => x >= left - 1 && x <= left + width + 1;
  const visible = runs.filter(isShown), one = visible.length === 1;
  const same = (run) => JSON.stringify(run.phases.map(([, , name]) => name)) + (run.phases.length > 1 ? run.phases.map(([step]) => Math.round(step / Math.max(1, run.total / 50))) : "");
  pen.save();
  pen.textAlign = "left"; // the axes leave theirs behind, and a phase's name would stand over the phase before
  pen.textBaseline = "alphabetic";
  pen.font = `600 ${11 * scale}px system-ui, sans-serif`;
  if (visible.length && visible.every((run) => same(run) === same(visible[0]))) {
    let free = -Infinity;
    for (const [step, tokens, name] of visible[0].phases) {
      const x = at(placesOf(visible[0], { step: [step], tokens: [tokens], value: [0] })[0]);
      if (!inside(x)) continue;
      pen.strokeStyle = pen.fillStyle = palette.phase;
      pen.setLineDash([scale, 3 * scale]);
      if (step > 0) { pen.beginPath(); pen.moveTo(x, top - 12 * scale); pen.lineTo(x, top + height); pen.stroke(); }
      const text = name.length > 24 ? name.slice(0, 16) + "…" + name.slice(-7) : name, needs = pen.measureText(text).width;
      const from = Math.max(Math.min(x + 4 * scale, left + width - needs), free);
      if (from + needs <= left + width + 2) { pen.fillText(text, from, top - 5 * scale); free = from + needs + 8 * scale; }
    }
  }
  pen.setLineDash([]);
  for (const run of visible) {
    if (visible.length > 20 && run !== focus()) continue;
    for (const [kind, step, tokens] of run.events) {
      if (kind === "fault" && chart !== charts[0]) continue;
      const x = at(placesOf(run, { step: [step], tokens: [tokens], value: [0] })[0]), y = top + height;
      if (!inside(x)) continue;
      pen.strokeStyle = pen.fillStyle = one ? (kind === "fault" ? palette.bad : palette.again) : look(run.number).colour;
      pen.lineWidth = 1.5 * scale;
      pen.beginPath();
      if (kind === "restart") { pen.moveTo(x, y); pen.lineTo(x, y - 12 * scale); pen.stroke(); pen.beginPath(); pen.arc(x, y - 12 * scale, 3 * scale, 0, 7); pen.fill(); }
      else { pen.moveTo(x, top); pen.lineTo(x + 5 * scale, top + 6 * scale); pen.lineTo(x, top + 12 * scale); pen.lineTo(x - 5 * scale, top + 6 * scale); pen.fill(); }
    }
    if (chart === charts[0] && chart.column === "loss") {
      const xs = placesOf(run), ys = run.columns.loss;
      pen.strokeStyle = palette.bad;
      pen.beginPath();
      for (let i = 0; i < ys.length; i++) if (ys[i] === null && inside(at(xs[i]))) { pen.moveTo(at(xs[i]), top); pen.lineTo(at(xs[i]), top + 8 * scale); }
      pen.stroke();
    }
  }
  pen.restore();
}

// ---- pointing

function focus() {
  return hot ?? runs.find((run) => run.name === state.pin && isShown(run)) ?? null;
}

function focusOn(run) {
  const before = chartFocus;
  hot = run;
  chartFocus = focus();
  if (before === chartFocus) return;
  for (const row of document.querySelectorAll("#runs tbody tr")) row.classList.toggle("on", chartFocus !== null && Number(row.dataset.run) === chartFocus.number);
  for (const chart of charts) if (chart.visible && chart.plot) emphasise(chart); else chart.stale = true;
}
let chartFocus = null;

function emphasise(chart) { // fade the other lines
  const run = focus();
  chart.drawn.forEach((line, i) => {
    const series = chart.plot.series[i + 1], mine = run === null || line.run === run;
    series.alpha = mine ? 1 : 0.15;
    series._focus = mine;
    series.width = line.faint ? 1 : (run !== null && mine ? 3 : runs.filter(isShown).length > 20 ? 1.25 : 1.75);
  });
  chart.plot.redraw(false);
}

function follow(chart, plot) {
  const { left, top } = plot.cursor, tip = out("#tip");
  if (left === undefined || left < 0) { chart.where.textContent = ""; return; }
  const x = plot.posToVal(left, "x");
  chart.where.textContent = shown(x, state.x === "seconds" ? "seconds" : "tokens", 4) + (state.x === "step" ? " steps" : state.x === "tokens" ? " tokens" : "");
  if (!chart.pointed) return;
  const near = [];
  for (const line of chart.drawn) {
    if (line.faint || !line.xs.length) continue;
    const reach = Math.abs(plot.posToVal(left + 25, "x") - x);
    if (x < line.xs[0] - reach || x > line.xs[line.xs.length - 1] + reach) continue;
    const i = nearest(line.xs, x), y = line.ys[i];
    if (y !== null && !(isLog(chart) && y <= 0)) near.push({ line, y, far: Math.abs(plot.valToPos(y, "y") - top) });
  }
  near.sort((a, b) => a.far - b.far);
  const meant = near.length && near[0].far < NEAR ? near[0].line.run : null;
  focusOn(runs.length > 1 ? meant : null);
  if (!near.length) { tip.hidden = true; return; }
  const head = chart.where.textContent + (near.length > MOST ? `, the ${MOST} nearest of ${near.length} lines` : "");
  tip.replaceChildren(make("div", { text: head }), ...near.slice(0, MOST).sort((a, b) => b.y - a.y).map(({ line, y }) =>
    make("div", { class: line.run === meant ? "on" : null }, make("span", { class: "name" }, key(line.run), make("span", { text: line.run.name + (line.guess ? ", baseline" : "") })), make("b", { text: shown(y, chart.form, 4) }))));
  tip.hidden = false;
  const box = plot.over.getBoundingClientRect(), px = box.left + left, py = box.top + top;
  tip.style.left = Math.max(4, Math.min(px + 18 + tip.offsetWidth < innerWidth ? px + 18 : px - 18 - tip.offsetWidth, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.max(4, Math.min(py + 14, innerHeight - tip.offsetHeight - 4)) + "px";
}

// ---- around the charts

function controls() {
  out("#axis").value = state.x;
  out("#smooth").value = state.smooth;
  out("#smoothness").textContent = state.smooth ? `mean over ${trimmed(100 * SMOOTHING[state.smooth], 2)} % of the steps` : "none";
  out("#smooth").setAttribute("aria-valuetext", out("#smoothness").textContent);
  out("#theme").value = state.theme;
  if (out("#filter").value !== state.q) out("#filter").value = state.q;
  out("#whole").hidden = state.zoom === null;
  const title = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
  out("#title").textContent = title;
  if (runs.length) document.title = runs.length === 1 ? title : doc.title || title;
  const last = runs.map((run) => run.last).sort().pop();
  out("#note").textContent = "Padding is not counted as tokens." + (last ? ` Last log line ${last}.` : "");
  const most = Math.max(0, ...runs.map((run) => run.total));
  out("#points").textContent = most > doc.points ? `Of each run at most about ${doc.points.toLocaleString("en")} steps are drawn: in equal ranges those with the lowest and the highest values, so spikes stay. Smoothed curves are means over all steps.` : "";
  const warnings = runs.flatMap((run) => run.warnings.map((text) => (runs.length > 1 ? run.name + ": " : "") + text));
  const notes = warnings.map((text) => make("p", { class: "box note warn", text }));
  out("#warnings").replaceChildren(...(notes.length > 4 ? [make("details", { class: "box" }, make("summary", { text: `${notes.length} warnings` }), ...notes)] : notes));
}

function cells(rows, tag) {
  return rows.map((row) => make("tr", {}, ...row.map((text) => make(tag, { text }))));
}

function settings() {
  const keys = runs.length > 1 && runs.length <= FEW ? differing() : [];
  const without = runs.filter((run) => !Object.keys(run.settings).length).map((run) => run.name);
  const notes = runs.length > 1 && without.length ? [make("p", { class: "note", text: "Without a config.yaml that can be read: " + without.slice(0, 10).join(", ") + (without.length > 10 ? ` and ${without.length - 10} more` : "") + "." })] : [];
  out("#settings").replaceChildren(...notes, ...(keys.length ? [make("section", { class: "box" }, make("h2", { text: "What differs in their configurations" }),
    make("div", { class: "wide" }, make("table", {}, make("thead", {}, ...cells([["Key", ...runs.map((run) => run.name)]], "th")),
      make("tbody", {}, ...keys.map((name) => make("tr", {}, make("th", { scope: "row", text: name }), ...runs.map((run) => make("td", { text: run.settings[name] ?? "absent" }))))))))] : []));
}

function about() { // of one run: the one that is picked, or the only one
  const run = runs.length === 1 ? runs[0] : runs.find((each) => each.name === state.pin);
  samples(run ?? runs.find((each) => each.samples.length && isShown(each)));
  data(run);
  const open = out("#about details")?.open;
  if (!run) { out("#about").replaceChildren(...(runs.length ? [make("p", { class: "note", text: "Click on the name of a run to see its tables and its configuration, and to keep its lines in front." })] : [])); return; }
  out("#about").replaceChildren(
    ...(runs.length > 1 ? [make("h2", { class: "of", text: run.name })] : []),
    make("dl", { class: "summary box" }, ...run.tiles.map(([name, value, small]) => make("div", {}, make("dt", { text: name }), make("dd", {}, value, make("small", { text: small }))))),
    ...run.tables.map((each) => make("section", { class: "box wide" }, make("h2", { text: each.title }), ...(each.note ? [make("p", { text: each.note })] : []),
      make("table", {}, make("thead", {}, ...cells([each.head], "th")), make("tbody", {}, ...cells(each.rows, "td"))))),
    make("details", { class: "box", open: open }, make("summary", { text: "Resolved configuration" }), make("pre", { text: run.config || "This run has no config.yaml." })));
}

function data(run) { // how long the documents are, of which licence and the like, and what became of the sources' documents
  const place = out("#data-of-run");
  if (!run?.data.length) { place.replaceChildren(); return; }
  const part = (share, name, title) => make("i", { class: name, style: `flex-basis: ${100 * share}%`, title });
  const kept = ["kept", "duplicates", "near duplicates", "left out otherwise"];
  const row = (name, parts, text) => make("li", {}, make("span", { text: name }), make("span", { class: "track", "aria-hidden": "true" }, ...parts), make("small", { text }));
  const picture = (each) => {
    const high = Math.max(...each.bars.flatMap(([, documents, tokens]) => [documents, tokens]), 0.001);
    const bar = (share, name) => make("i", { class: name, style: `height: ${100 * share / high}%` });
    const bars = each.bars.map(([from, documents, tokens, text]) => make("li", { title: text, "aria-label": text, role: "img" },
      make("span", { class: "pair" }, bar(documents, "documents"), bar(tokens, "tokens")), make("small", { text: scaled(from, 3) })));
    const fields = each.fields.map(([name, shares]) => make("section", {}, make("h3", { text: `${name}, by tokens` }),
      make("ul", { class: "shares" }, ...shares.map(([value, share, text]) => row(value, [part(share, "tokens", text)], text)))));
    const sources = each.sources.length ? [make("section", {}, make("h3", {}, "Sources, by documents: ", ...kept.map((name, i) => make("span", { class: "legend part" + i, text: name }))),
      make("ul", { class: "shares" }, ...each.sources.map(([name, shares, text]) => row(name, shares.map((share, i) => part(share, "part" + i, kept[i])), text))))] : [];
    return make("section", { class: "box data" }, make("h2", { text: each.title }), make("p", { text: each.note }),
      ...(bars.length ? [make("section", {}, make("h3", {}, "Tokens in a document: ", make("span", { class: "legend documents", text: "share of documents" }), make("span", { class: "legend tokens", text: "share of tokens" })),
        make("ul", { class: "bins" }, ...bars))] : []), ...fields, ...sources);
  };
  place.replaceChildren(make("details", { open: out("#data-of-run details")?.open ?? true }, make("summary", { text: "The data" }), ...run.data.map(picture)));
}

function samples(run) {
  const place = out("#samples");
  if (!run?.samples.length) { place.replaceChildren(); return; }
  const last = run.samples.length - 1, at = Math.min(state.sample ?? last, last), sample = run.samples[at];
  const text = make("div", { class: "texts" }), where = make("output");
  const show = (number) => {
    const chosen = run.samples[number];
    where.textContent = `after ${scaled(chosen.tokens, 4)} tokens, step ${chosen.step.toLocaleString("en")}, ${chosen.phase}: ${number + 1} of ${last + 1}`;
    text.replaceChildren(...chosen.texts.map(({ words, predicted }) => {
      const by = new Map(predicted.map((each) => [each.at, each])), parts = [];
      words.forEach((word, i) => {
        const each = by.get(i);
        if (!each) { parts.push(word); return; }
        const guess = each.guesses[0] ?? ["", 0], right = guess[0] === each.is;
        const all = each.guesses.map(([token, share]) => `${token.trim() || JSON.stringify(token)} ${trimmed(100 * share, 2)} %`).join(", ");
        const lead = /^\s/.test(each.is) ? " " : "";
        parts.push(lead, make("span", { class: right ? "fill right" : "fill wrong", tabindex: 0, title: `it is: ${each.is.trim() || JSON.stringify(each.is)}; guesses: ${all}` },
          make("b", { text: guess[0].trim() || JSON.stringify(guess[0]) }), ...(right ? [] : [make("small", { text: each.is.trim() || JSON.stringify(each.is) })])));
      });
      return make("p", {}, ...parts);
    }));
  };
  const slider = make("input", { type: "range", id: "sample", min: 0, max: last, step: 1, "aria-label": "validation", oninput: (event) => { state.sample = Number(event.target.value) === last ? null : Number(event.target.value); show(Number(event.target.value)); } });
  slider.value = at;
  place.replaceChildren(make("section", { class: "box" }, make("h2", { text: "What the model fills in" + (runs.length > 1 ? ": " + run.name : "") }),
    make("p", { class: "note" }, "Held-out text at each validation. A framed word is the likeliest guess for a token that is hidden; where it is wrong (dashed), what stands there follows. Pointing at it tells the other guesses."),
    make("div", { class: "tools" }, slider, where), text));
  show(at);
}

// ---- CSV

function quoted(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && /^[=+\-@\t]/.test(text)) text = "'" + text; // a spreadsheet would compute it
  return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}

function csv() {
  const visible = runs.filter(isShown), names = [...new Set(visible.flatMap((run) => Object.keys(run.columns)))];
  const csvRows = [["run", "kind", ...names, "value"].map(quoted).join(",")];
  for (const run of visible) {
    const columns = names.map((name) => run.columns[name] ?? []), count = (run.columns.step ?? []).length;
    for (let i = 0; i < count; i++) csvRows.push([quoted(run.name), "step", ...columns.map((column) => column[i] ?? ""), ""].join(","));
    for (const curve of run.curves)
      curve.step.forEach((step, i) => csvRows.push([quoted(run.name), quoted(curve.title), ...names.map((name) => (name === "step" ? step : name === "tokens" ? curve.tokens[i] : "")), curve.value[i] ?? ""].join(",")));
  }
  return csvRows.join("\n") + "\n";
}

function download() {
  const link = make("a", { href: URL.createObjectURL(new Blob([csv()], { type: "text/csv" })), download: (runs.length === 1 ? runs[0].name : "runs").replace(/[^\w.-]+/g, "_") + ".csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- while runs train: what is new is asked of the server

let polls = 0;
async function poll() {
  let wait = POLL;
  try {
    const have = runs.map((run) => run.known.join(".")).join(",");
    const answer = await fetch("data.json", { method: "POST", body: have, cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const update = await answer.json();
    for (const [index, run] of update.runs) take(index, run);
    doc.points = update.points;
    if (update.runs.length || !polls) everything();
    if (update.more) wait = 50;
    out("#live").textContent = update.more ? "reading the runs ..." : runs.length ? "" : "There are no runs yet.";
  } catch (error) {
    out("#live").textContent = "The server does not answer; what is shown stays.";
  }
  polls++;
  setTimeout(poll, wait);
}

function everything() {
  if (hot) hot = runs[hot.number];
  table();
  redraw();
  about();
}

readState();
build();
doc.runs.forEach((run, index) => take(index, run));
applyTheme();
if (runs.length || !doc.live) everything(); else controls();
darkScreen.addEventListener("change", () => { applyTheme(); everything(); });
let before = innerWidth, resizing = null;
addEventListener("resize", () => {
  if (innerWidth === before) return;
  before = innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 100);
});
addEventListener("hashchange", () => { readState(); applyTheme(); everything(); });
if (doc.live) poll();
