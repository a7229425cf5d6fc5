// One crosshair over all charts: pointing at a place in one shows the values of all at the same token count.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const UNITS = 10000;

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
  values: [...figure.querySelectorAll(".keys b")],
  cross: figure.querySelector(".cross"),
  dots: [...figure.querySelectorAll(".dot")],
  plot: figure.querySelector(".frame > svg"),
}));

function show(x) {
  const step = nearest(page.steps.x, x);
  for (const figure of figures) {
    figure.where.textContent = page.steps.text[step];
    figure.cross.setAttribute("x1", x / 100 + "%");
    figure.cross.setAttribute("x2", x / 100 + "%");
    figure.cross.style.visibility = "visible";
    figure.lines.forEach((line, i) => {
      const at = nearest(line.x, x), y = line.y[at];
      figure.values[i].textContent = line.text[at];
      figure.dots[i].setAttribute("cx", line.x[at] / 100 + "%");
      figure.dots[i].setAttribute("cy", (y ?? 0) / 100 + "%");
      figure.dots[i].style.visibility = y === null ? "hidden" : "visible";
    });
  }
}

function hide() {
  for (const figure of figures) {
    figure.where.textContent = figure.where.dataset.last;
    figure.cross.style.visibility = "hidden";
    figure.lines.forEach((line, i) => {
      figure.values[i].textContent = line.text[line.text.length - 1];
      figure.dots[i].style.visibility = "hidden";
    });
  }
}

for (const { plot } of figures) {
  const move = (event) => {
    const box = plot.querySelector(".plot").getBoundingClientRect();
    show(Math.min(UNITS, Math.max(0, Math.round(((event.clientX - box.left) / box.width) * UNITS))));
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", hide);
}
