// The pool map: live, and to be asked by pointer and keyboard who has a page; a table says the same in words.

import { byId, calm, el, setText } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { FLASH_MS, draw, gridFor, squareUnder } from "./pool_drawing.js";
import { KINDS, kindAt, layOut, sentence } from "./pool_owners.js";
import { pulse } from "./pulse.js";

const HEIGHT = 292;
const STEPS = {
  ArrowLeft: () => -1,
  ArrowRight: () => 1,
  ArrowUp: (grid) => -grid.columns,
  ArrowDown: (grid) => grid.columns,
};

export function startPoolMap() {
  const view = new PoolMapView();
  pulse.addEventListener("beat", () => view.update());
}

class PoolMapView {
  #canvas = byId("pool-canvas");
  #frame = byId("pool-frame");
  #readout = byId("pool-readout");
  #table = byId("pool-owners");
  #legend = {};
  #map = null;
  #grid = null;
  #pointed = -1;
  #cursor = -1;
  #kind = null;
  #changedAt = new Map();
  #flashing = false;

  constructor() {
    for (const kind of Object.keys(KINDS)) this.#addLegend(kind);
    new ResizeObserver(() => this.#fit()).observe(this.#frame);
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    document.addEventListener("themechange", redraw);
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => this.#leave());
    this.#canvas.addEventListener("keydown", (event) => this.#press(event));
    this.#canvas.addEventListener("blur", () => this.#setCursor(-1));
    this.#canvas.addEventListener("focus", () => this.#cursor < 0 && this.#setCursor(0));
    byId("pool-details").addEventListener("toggle", () => this.#fillTable());
  }

  update() {
    if (pulse.state !== "live") return;
    const before = this.#map;
    this.#map = layOut(pulse.pool);
    if (before?.total !== this.#map.total) this.#fit();
    else this.#noteChanges(before);
    this.#tell();
    this.#fillTable();
    this.#draw();
  }

  #tell() {
    const { counts, total, blockBytes } = this.#map;
    for (const [kind, cells] of Object.entries(this.#legend)) {
      setText(cells.pages, count(counts[kind]));
      setText(cells.share, percent(counts[kind], total));
      setText(cells.size, bytes(counts[kind] * blockBytes));
    }
    const each = this.#grid?.pagesEach > 1 ? ` One square is ${this.#grid.pagesEach} pages.` : "";
    setText(
      byId("pool-about"),
      `${count(total)} pages of ${pulse.pool.page_tokens} tokens, ${bytes(blockBytes)} each.${each}`,
    );
    const used = total - counts.free;
    const parts = Object.entries(KINDS).map(([kind, { name }]) => `${name.toLowerCase()} ${count(counts[kind])}`);
    this.#canvas.setAttribute(
      "aria-label",
      `Pool map, ${percent(used, total)} in use: ${parts.join(", ")}. Arrow keys go from page to page.`,
    );
  }

  #addLegend(kind) {
    const { name, about } = KINDS[kind];
    const cells = { swatch: el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }) };
    for (const part of ["pages", "share", "size"]) cells[part] = el("span", { class: `figure ${part}` });
    const item = el(
      "li",
      { title: about },
      cells.swatch,
      el("span", { class: "legend-name" }, name),
      cells.pages,
      el("span", { class: "visually-hidden" }, " pages, "),
      cells.share,
      cells.size,
    );
    item.addEventListener("pointerenter", () => this.#choose(kind));
    item.addEventListener("pointerleave", () => this.#choose(null));
    byId("pool-legend").append(item);
    this.#legend[kind] = cells;
  }

  #choose(kind) {
    this.#kind = kind;
    this.#draw();
  }

  #fit() {
    if (!this.#map || !this.#frame.clientWidth) return;
    this.#grid = gridFor(this.#map.total, this.#frame.clientWidth, HEIGHT);
    this.#changedAt.clear();
    this.#tell();
    this.#draw();
  }

  #noteChanges(before) {
    if (calm() || this.#grid?.pagesEach !== 1) return;
    const now = performance.now();
    for (let page = 0; page < this.#map.total; page += 1) {
      if (kindAt(before, page) !== kindAt(this.#map, page)) this.#changedAt.set(page, now);
    }
    if (this.#changedAt.size && !this.#flashing) this.#flash();
  }

  #flash() {
    const now = performance.now();
    for (const [square, at] of this.#changedAt) if (now - at >= FLASH_MS) this.#changedAt.delete(square);
    this.#flashing = this.#changedAt.size > 0;
    this.#draw();
    if (this.#flashing) requestAnimationFrame(() => this.#flash());
  }

  #draw() {
    if (!this.#map || !this.#grid) return;
    const shown = this.#pointed >= 0 ? this.#pointed : this.#cursor;
    draw(this.#canvas, this.#map, this.#grid, this.#colours(), {
      chosen: this.#chosen(shown),
      cursor: shown,
      changedAt: this.#changedAt,
      now: performance.now(),
    });
  }

  #chosen(square) {
    if (this.#kind) return (_, kind) => kind === this.#kind;
    const place = square < 0 ? -1 : this.#map.pages[square * this.#grid.pagesEach];
    return place < 0 ? null : (other) => other === place;
  }

  /** The theme's own, read where CSS has resolved them. */
  #colours() {
    const colours = { ink: getComputedStyle(this.#readout).color };
    for (const [kind, { swatch }] of Object.entries(this.#legend)) colours[kind] = getComputedStyle(swatch).color;
    return colours;
  }

  #point(event) {
    if (!this.#grid) return;
    const box = this.#canvas.getBoundingClientRect();
    this.#pointed = squareUnder(this.#grid, event.clientX - box.left, event.clientY - box.top);
    this.#say(this.#pointed);
  }

  #leave() {
    this.#pointed = -1;
    this.#say(this.#cursor);
  }

  #press(event) {
    if (!this.#grid) return;
    const last = this.#grid.squares - 1;
    const step = STEPS[event.key]?.(this.#grid);
    const wanted =
      { Home: 0, End: last, PageUp: this.#otherOwner(-1), PageDown: this.#otherOwner(1) }[event.key] ??
      (step && this.#cursor + step);
    if (wanted === undefined) return;
    event.preventDefault();
    this.#setCursor(Math.min(last, Math.max(0, wanted)));
  }

  /** The next square of another owner: one key press from adapter to adapter. */
  #otherOwner(step) {
    const each = this.#grid.pagesEach;
    const place = this.#map.pages[this.#cursor * each];
    let square = this.#cursor + step;
    while (square > 0 && square < this.#grid.squares - 1 && this.#map.pages[square * each] === place) square += step;
    return square;
  }

  #setCursor(square) {
    this.#cursor = square;
    this.#say(square);
  }

  #say(square) {
    const hint = "Point at a page, or focus the map and use the arrow keys, to see whose it is.";
    setText(this.#readout, square < 0 || !this.#map ? hint : sentence(this.#map, square * this.#grid.pagesEach));
    this.#draw();
  }

  #fillTable() {
    if (!this.#map || !byId("pool-details").open) return;
    const rows = [...this.#map.owners]
      .sort((a, b) => b.pages - a.pages)
      .map((owner) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", class: "id" }, owner.who),
          el("td", {}, KINDS[owner.kind].name),
          el("td", { class: "number" }, count(owner.pages)),
          el("td", { class: "number" }, bytes(owner.pages * this.#map.blockBytes)),
          el("td", {}, owner.more.join(", ")),
        ),
      );
    this.#table.replaceChildren(...rows);
  }
}
