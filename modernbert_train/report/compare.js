// The table of runs is the legend of all charts: it sorts and filters, a click hides a run and pointing highlights it;
// pointing at a chart names the lines there. Everything it shows stands in the page already.
const table = document.getElementById("runs");
const body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
const rows = [...body.rows]; // in the order of the runs' numbers, however the table is sorted
const charts = document.querySelector(".charts");
const tools = document.querySelector(".tools");
const filter = tools.querySelector("input");
const keys = rows.map((row) => row.querySelector(".key"));
const names = keys.map((key) => key.textContent);
const parts = figures.map((figure) => { // what is drawn of each run, by chart
  const found = rows.map(() => []);
  for (const part of figure.frame.querySelectorAll("[data-run]")) found[part.dataset.run].push(part);
  return found;
});
const SNAP = 24; // px within which a line is meant
const MOST = 10; // lines that are named at once
let off = new Set(); // runs switched off
let hot = null; // the run that is highlighted

const found = rows.map((row) => [...row.cells].map((cell, i) => words(heads[i], cell)));
for (const row of document.querySelectorAll("#settings tbody tr"))
  found.forEach((texts, run) => texts.push(words(row.cells[0], row.cells[run + 1])));
const texts = found.map((each, run) => (names[run] + "\n" + each.join("\n")).toLowerCase());

function words(head, cell) {
  return head.textContent + "=" + (cell.title || cell.textContent);
}

function shown(run) {
  return !rows[run].hidden && !off.has(run);
}

function update() {
  const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  rows.forEach((row, run) => {
    row.hidden = !wanted.every((word) => texts[run].includes(word));
    row.classList.toggle("off", off.has(run));
    keys[run].parentNode.setAttribute("aria-pressed", !off.has(run));
    for (const chart of parts) for (const part of chart[run]) part.classList.toggle("off", !shown(run));
    count += shown(run);
  });
  if (hot !== null && !shown(hot)) leave();
  tools.querySelector("output").textContent = `${count} of ${rows.length} shown`;
}

function highlight(run) {
  if (run === hot) return;
  if (hot !== null) rows[hot].classList.remove("on");
  hot = run;
  charts.classList.toggle("hot", run !== null);
  if (run !== null) rows[run].classList.add("on");
  figures.forEach((figure, i) => figure.hot?.replaceChildren(...(run === null ? [] : parts[i][run].map(copy))));
}

function copy(part) {
  if (part.tagName !== "path") return part.cloneNode(true);
  const square = part.parentNode.cloneNode(false); // that stretches with the page
  square.append(part.cloneNode(true));
  return square;
}

function name(run, x, pointed) {
  for (const figure of figures) {
    const line = run === null ? undefined : figure.lines.find((each) => each.run === run), dot = figure.dots[0];
    if (!dot) continue;
    let at = line ? (x === null ? line.x.length - 1 : nearest(line.x, x)) : 0;
    while (x === null && at > 0 && line?.y[at] === null) at--; // the last value that is a number
    const y = line ? line.y[at] : null;
    placeDot(dot, line ? line.x[at] : 0, y);
    figure.label.textContent = y === null || figure === pointed ? "" : `${brief(names[run])} ${line.text[at]}`;
    if (y === null) continue;
    const right = line.x[at] > UNITS / 2;
    figure.label.setAttribute("x", line.x[at] / 100 + "%");
    figure.label.setAttribute("y", y / 100 + "%");
    figure.label.setAttribute("dx", right ? -9 : 9);
    figure.label.setAttribute("dy", y < UNITS / 8 ? 20 : -9);
    figure.label.setAttribute("text-anchor", right ? "end" : "start");
  }
}

function leave() {
  highlight(null);
  name(null, null);
}

function brief(text) {
  return text.length > 26 ? text.slice(0, 17) + "…" + text.slice(-8) : text;
}

function heightAt(line, x) {
  const last = line.x.length - 1, near = UNITS / 50; // a lone point is met from that far
  if (x < line.x[0] - near || x > line.x[last] + near) return null;
  const at = nearest(line.x, x), other = x < line.x[at] ? at - 1 : at + 1;
  if (other < 0 || other > last || line.y[other] === null || line.y[at] === null || line.x[at] === line.x[other]) return line.y[at];
  return line.y[at] + ((line.y[other] - line.y[at]) * (x - line.x[at])) / (line.x[other] - line.x[at]);
}

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

followers.push((figure, x, y, box, event) => {
  tip.hidden = true;
  if (!figure) {
    leave();
    return;
  }
  const there = figure.lines
    .map((line) => ({ line, at: nearest(line.x, x), y: shown(line.run) ? heightAt(line, x) : null }))
    .filter((each) => each.y !== null)
    .sort((a, b) => Math.abs(a.y - y) - Math.abs(b.y - y));
  const meant = there.length && (Math.abs(there[0].y - y) * box.height) / UNITS < SNAP ? there[0].line.run : null;
  highlight(meant);
  name(meant, x, figure); // the box names it where the pointer is
  if (!there.length) return;
  const first = document.createElement("div");
  first.textContent = page.steps.text[nearest(page.steps.x, x)] + (there.length > MOST ? `, the ${MOST} nearest of ${there.length} runs` : "");
  tip.replaceChildren(first, ...there.slice(0, MOST).sort((a, b) => a.line.y[a.at] - b.line.y[b.at]).map(({ line, at }) => {
    const entry = document.createElement("div"), value = document.createElement("b");
    value.textContent = line.text[at];
    entry.className = line.run === meant ? "on" : "";
    entry.append(keys[line.run].cloneNode(true), value);
    return entry;
  }));
  tip.hidden = false;
  const left = event.clientX + 18 + tip.offsetWidth < innerWidth ? event.clientX + 18 : event.clientX - 18 - tip.offsetWidth;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)) + "px";
});

function sortBy(column) {
  const up = heads[column].getAttribute("aria-sort") !== "ascending";
  heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : up ? "ascending" : "descending"));
  const value = (row) => row.cells[column].dataset.value ?? (row.cells[column].title || row.cells[column].textContent);
  const missing = (text) => text === "" || text === "absent";
  const order = (a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b); // last, whichever way
    const [x, y] = [Number(a), Number(b)];
    const found = isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) || a.localeCompare(b, "en", { numeric: true }) : x - y;
    return up ? found : -found;
  };
  body.append(...[...rows].sort((a, b) => order(value(a), value(b))));
}

function buttonOf(cell) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...cell.childNodes);
  cell.append(button);
  return button;
}

heads.forEach((head, column) => {
  head.setAttribute("aria-sort", "none");
  buttonOf(head).addEventListener("click", () => sortBy(column));
});
rows.forEach((row, run) => {
  buttonOf(row.cells[0]).addEventListener("click", () => {
    off.has(run) ? off.delete(run) : off.add(run);
    update();
  });
  const point = () => { if (shown(run)) { highlight(run); name(run, null); } };
  row.addEventListener("pointerenter", point);
  row.addEventListener("pointerleave", leave);
  row.addEventListener("focusin", point);
  row.addEventListener("focusout", leave);
});
filter.addEventListener("input", update);
for (const button of tools.querySelectorAll("button"))
  button.addEventListener("click", () => {
    rows.forEach((row, run) => { if (!row.hidden) off[button.dataset.all === "hide" ? "add" : "delete"](run); });
    update();
  });
tools.hidden = false;
update();
