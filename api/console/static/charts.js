// The four charts, and the same figures as a table.

import { Chart } from "./chart.js";
import { byId, el } from "./dom.js";
import { clock, count, ms, msTick, rate } from "./format.js";
import { pulse } from "./pulse.js";

const NEWEST_ROWS = 20;
const CHARTS = [
  {
    title: "Tokens a second",
    format: rate,
    tick: count,
    least: 10,
    series: [
      { key: "tokens", name: "generated" },
      { key: "prompt", name: "prompt" },
    ],
  },
  {
    title: "Requests",
    format: count,
    tick: count,
    least: 2,
    series: [
      { key: "running", name: "running" },
      { key: "waiting", name: "waiting" },
      { key: "loading", name: "loading" },
    ],
  },
  {
    title: "Time to first token",
    format: ms,
    tick: msTick,
    least: 10,
    series: [
      { key: "first50", name: "median" },
      { key: "first95", name: "95 %" },
    ],
  },
  {
    title: "Time between tokens",
    format: ms,
    tick: msTick,
    least: 10,
    series: [
      { key: "inter50", name: "median" },
      { key: "inter95", name: "95 %" },
    ],
  },
];
const COLUMNS = CHARTS.flatMap(({ series, format }) => series.map(({ key }) => [key, format]));

export function startCharts() {
  const charts = CHARTS.map((options) => new Chart(options));
  byId("charts").append(...charts.map((chart) => chart.node));
  const table = byId("figures-details");
  table.addEventListener("toggle", fillTable);
  pulse.addEventListener("beat", () => {
    const now = Date.now();
    for (const chart of charts) chart.show(pulse.history.points, now);
    fillTable();
  });
}

function fillTable() {
  if (!byId("figures-details").open) return;
  const rows = pulse.history.points.slice(-NEWEST_ROWS).reverse();
  byId("figures-rows").replaceChildren(
    ...rows.map((point) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, clock(point.at)),
        point.gap
          ? el("td", { colspan: COLUMNS.length }, "the server did not answer, or was restarted")
          : COLUMNS.map(([key, format]) => el("td", { class: "number" }, format(point[key]))),
      ),
    ),
  );
}
