// One line chart in SVG: lines with gaps, a readout by pointer and arrow keys, and its latest figures in words.

import { el, setText, svg } from "./dom.js";
import { UNKNOWN, clock } from "./format.js";
import { SHOWN_MS } from "./metrics.js";

const HEIGHT = 144;
const PAD = { left: 44, right: 6, top: 8, bottom: 18 };
/** Points further apart than this are not joined: nobody knows what was between. */
const LONGEST_JOIN_MS = 16_000;
const LEAST_SPAN_MS = 10_000;
const TICK_STEPS_MS = [2_000, 5_000, 10_000, 30_000, 60_000];
const MOST_TICKS = 5;

export class Chart {
  #points = [];
  #series;
  #format;
  #tick;
  #figures = {};
  #at = null;
  #latest = null;

  /** `series`: [{ key, name }], the first drawn as a full line, further ones dashed. */
  constructor({ title, series, format, tick, least }) {
    this.#series = series;
    this.#format = format;
    this.#tick = tick;
    this.least = least;
    this.title = title;
    this.plot = svg("svg", { class: "plot", role: "img", tabindex: "0", height: HEIGHT, "aria-label": title });
    const keys = series.map(({ key, name }, index) => {
      this.#figures[key] = el("span", { class: "figure" }, UNKNOWN);
      const line = svg("svg", { class: "key-line", width: 18, height: 8, "aria-hidden": "true" });
      line.append(svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: `line line-${index}` }));
      return el("span", { class: "key" }, line, `${name} `, this.#figures[key]);
    });
    this.said = el("span", { class: "visually-hidden", "aria-live": "polite" });
    this.time = el("span", { class: "chart-time" });
    const caption = el(
      "figcaption",
      {},
      el("span", { class: "chart-title" }, title),
      this.time,
      el("span", { class: "keys" }, keys),
    );
    this.node = el("figure", { class: "chart" }, caption, this.plot, this.said);
    new ResizeObserver(() => this.#draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#point(event.clientX));
    this.plot.addEventListener("pointerleave", () => this.#choose(null));
    this.plot.addEventListener("blur", () => this.#choose(null));
    this.plot.addEventListener("keydown", (event) => this.#press(event));
  }

  show(points, now) {
    this.#points = points;
    this.#latest = now;
    this.#draw();
  }

  #draw() {
    const width = this.plot.clientWidth;
    if (!width || this.#latest === null) return;
    const top = niceTop(Math.max(this.least, ...this.#values()));
    const span = this.#span();
    const x = (at) => PAD.left + ((width - PAD.left - PAD.right) * (at - this.#latest + span)) / span;
    const y = (value) => PAD.top + (HEIGHT - PAD.top - PAD.bottom) * (1 - value / top);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const level = y(share * top);
      parts.push(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: level, y2: level }));
      parts.push(
        svg("text", { class: "tick", x: PAD.left - 6, y: level + 3, "text-anchor": "end" }, this.#tick(share * top)),
      );
    }
    for (const ago of ticks(span)) {
      const anchor = ago ? "middle" : "end";
      parts.push(
        svg("text", { class: "tick", x: x(this.#latest - ago), y: HEIGHT - 4, "text-anchor": anchor }, since(ago)),
      );
    }
    this.#series.forEach(({ key }, index) => {
      for (const piece of pieces(this.#points, key)) {
        const path = piece
          .map(({ at, value }, i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`)
          .join("");
        if (index === 0)
          parts.push(
            svg("path", {
              class: "area",
              d: `${path}L${x(piece.at(-1).at).toFixed(1)} ${y(0)}L${x(piece[0].at).toFixed(1)} ${y(0)}Z`,
            }),
          );
        parts.push(svg("path", { class: `line line-${index}`, d: piece.length > 1 ? path : `${path}h1.5` }));
      }
    });
    const shown = this.#shown();
    if (shown && this.#at !== null)
      parts.push(
        svg("line", { class: "cross", x1: x(shown.at), x2: x(shown.at), y1: PAD.top, y2: HEIGHT - PAD.bottom }),
      );
    this.plot.replaceChildren(...parts);
    this.#tell(shown);
  }

  /** How far back the chart goes: as far as there are points, so that the first ones already fill it. */
  #span() {
    const first = this.#points[0]?.at ?? this.#latest;
    return Math.min(SHOWN_MS, Math.max(LEAST_SPAN_MS, this.#latest - first));
  }

  #values() {
    return this.#points.flatMap((point) => this.#series.map(({ key }) => point[key] ?? 0));
  }

  #shown() {
    return this.#at === null
      ? this.#points.at(-1)
      : (this.#points.find((point) => point.at >= this.#at) ?? this.#points.at(-1));
  }

  #tell(point) {
    const said = this.#series.map(({ key, name }) => {
      const value = point?.[key];
      const text = value === null || value === undefined ? UNKNOWN : this.#format(value);
      setText(this.#figures[key], text);
      return `${name} ${text === UNKNOWN ? "unknown" : text}`;
    });
    setText(this.time, this.#at !== null && point ? clock(point.at) : "");
    this.plot.setAttribute(
      "aria-label",
      `${this.title}, ${since(this.#span()).slice(1)} back. Latest: ${said.join(", ")}. Arrow keys go back in time.`,
    );
    if (document.activeElement === this.plot && this.#at !== null && point)
      setText(this.said, `${clock(point.at)}: ${said.join(", ")}`);
  }

  #point(clientX) {
    const box = this.plot.getBoundingClientRect();
    const share = (clientX - box.left - PAD.left) / Math.max(1, box.width - PAD.left - PAD.right);
    this.#choose(this.#latest - (1 - share) * this.#span());
  }

  #press(event) {
    if (!this.#points.length) return;
    const here = this.#at === null ? this.#points.length : this.#points.indexOf(this.#shown());
    const wanted = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: this.#points.length - 1 }[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (wanted === undefined) return;
    event.preventDefault();
    this.#choose(this.#points[Math.min(this.#points.length - 1, Math.max(0, wanted))].at);
  }

  #choose(at) {
    this.#at = at;
    this.#draw();
  }
}

/** The stretches of a series that are known. */
export function pieces(points, key) {
  const found = [];
  let piece = [];
  for (const point of points) {
    const value = point[key];
    const known = value !== null && value !== undefined;
    if (piece.length && (!known || point.at - piece.at(-1).at > LONGEST_JOIN_MS)) {
      found.push(piece);
      piece = [];
    }
    if (known) piece.push({ at: point.at, value });
  }
  return piece.length ? [...found, piece] : found;
}

/** How long before now the marks of the time axis are: now itself, and up to four before it. */
export function ticks(span) {
  const step = TICK_STEPS_MS.find((one) => span / one <= MOST_TICKS) ?? TICK_STEPS_MS.at(-1);
  return Array.from({ length: Math.ceil(span / step) }, (_, index) => index * step);
}

/** `−30 s`, `−2 min`. */
function since(ago) {
  if (!ago) return "now";
  return ago < 60_000 ? `−${Math.round(ago / 1000)} s` : `−${Number((ago / 60_000).toFixed(1))} min`;
}

/** The least 1, 2 or 4 times a power of ten that is not below: its half is round, too. */
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}
