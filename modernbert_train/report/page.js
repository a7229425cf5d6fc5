// One crosshair over all charts: pointing at a place in one shows the values of all at the same token count.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const UNITS = 10000;
const followers = []; // called with the chart, the place and the event, or with nothing when the pointer leaves

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => ({
  lines: page.charts[figure.dataset.chart],
  where: figure.querySelector(".where"),
  values: [...figure.querySelectorAll(".keys b")], // of a run alone, one for each line; runs compared have none
  cross: figure.querySelector(".cross"),
  dots: [...figure.querySelectorAll(".dot")],
  hot: figure.querySelector(".over .hot"), // takes a copy of the run that is pointed at
  label: figure.querySelector(".label"),
  frame: figure.querySelector(".frame"),
}));

function placeDot(dot, x, y) {
  dot.setAttribute("cx", x / 100 + "%");
  dot.setAttribute("cy", (y ?? 0) / 100 + "%");
  dot.style.visibility = y === null ? "hidden" : "visible";
}

function show(x) {
  const step = nearest(page.steps.x, x);
  for (const figure of figures) {
    figure.where.textContent = page.steps.text[step];
    figure.cross.setAttribute("x1", x / 100 + "%");
    figure.cross.setAttribute("x2", x / 100 + "%");
    figure.cross.style.visibility = "visible";
    figure.values.forEach((value, i) => {
      const line = figure.lines[i], at = nearest(line.x, x);
      value.textContent = line.text[at];
      placeDot(figure.dots[i], line.x[at], line.y[at]);
    });
  }
}

function hide() {
  for (const figure of figures) {
    figure.where.textContent = figure.where.dataset.last;
    figure.cross.style.visibility = "hidden";
    figure.values.forEach((value, i) => {
      value.textContent = figure.lines[i].text[figure.lines[i].text.length - 1];
      figure.dots[i].style.visibility = "hidden";
    });
  }
  for (const follow of followers) follow();
}

for (const figure of figures) {
  const move = (event) => {
    const plot = figure.frame.querySelector(".plot");
    if (!plot) return; // nothing recorded yet
    const box = plot.getBoundingClientRect();
    const x = Math.min(UNITS, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * UNITS)));
    show(x);
    for (const follow of followers) follow(figure, x, ((event.clientY - box.top) / box.height) * UNITS, box, event);
  };
  figure.frame.addEventListener("pointermove", move);
  figure.frame.addEventListener("pointerdown", move);
  figure.frame.addEventListener("pointerleave", hide);
}
