// The pool map: live, and to be asked by pointer and keyboard who has which pages; a table says the same in words.
// A bar shows the whole pool to scale. Below it are owners as areas, or, zoomed in and in small pools, single pages.

import { byId, calm, el, setText } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { AreaView } from "./pool_areas.js";
import { KINDS, kindAt, layOut } from "./pool_owners.js";
import { PageView } from "./pool_pages.js";
import { pulse } from "./pulse.js";

const HEIGHT = 292;
const BAR_HEIGHT = 22;
const HINT = byId("pool-readout").textContent;

export function startPoolMap() {
  const view = new PoolMapView();
  pulse.addEventListener("beat", () => view.update());
}

class PoolMapView {
  #canvas = byId("pool-canvas");
  #bar = byId("pool-bar");
  #frame = byId("pool-frame");
  #readout = byId("pool-readout");
  #table = byId("pool-owners");
  #zoom = byId("pool-zoom");
  #legend = {};
  #map = null;
  #pages = new PageView();
  #areas = new AreaView();
  #view = this.#areas;
  /** Whether the view was chosen, and is not that of a pool of this size. */
  #isChosen = false;
  #pointed = -1;
  #cursor = -1;
  #kind = null;
  #flashing = false;
  #isFitted = false;

  constructor() {
    for (const kind of Object.keys(KINDS)) this.#addLegend(kind);
    new ResizeObserver(() => this.#fit()).observe(this.#frame);
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    document.addEventListener("themechange", redraw);
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => this.#leave());
    this.#canvas.addEventListener("click", () => this.#view === this.#areas && this.#zoomTo(this.#pointed));
    this.#canvas.addEventListener("keydown", (event) => this.#press(event));
    this.#canvas.addEventListener("blur", () => this.#setCursor(-1));
    this.#canvas.addEventListener("focus", () => this.#cursor < 0 && this.#setCursor(0));
    this.#bar.addEventListener("click", (event) => this.#zoomToPage(this.#pageOfBar(event)));
    this.#zoom.addEventListener("click", () => this.#choose(this.#view === this.#areas ? this.#pages : this.#areas));
    byId("pool-details").addEventListener("toggle", () => this.#fillTable());
  }

  update() {
    if (pulse.state !== "live") return;
    const before = this.#map;
    this.#map = layOut(pulse.pool);
    if (!this.#isFitted || before.total !== this.#map.total) this.#fit();
    else this.#noteChanges();
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
    setText(
      byId("pool-about"),
      `${count(total)} pages of ${pulse.pool.page_tokens} tokens, ${bytes(blockBytes)} each.${this.#view.about}`,
    );
    setText(this.#zoom, this.#view === this.#areas ? "Show pages" : "Show owners");
    const used = total - counts.free;
    const parts = Object.entries(KINDS).map(([kind, { name }]) => `${name.toLowerCase()} ${count(counts[kind])}`);
    const keys =
      this.#view === this.#areas
        ? "Arrow keys go from owner to owner, Enter shows its pages."
        : "Arrow keys go from page to page, Escape shows owners.";
    this.#canvas.setAttribute(
      "aria-label",
      `Pool map, ${percent(used, total)} in use: ${parts.join(", ")}. ${keys}`,
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
    item.addEventListener("pointerenter", () => this.#stress(kind));
    item.addEventListener("pointerleave", () => this.#stress(null));
    byId("pool-legend").append(item);
    this.#legend[kind] = cells;
  }

  #stress(kind) {
    this.#kind = kind;
    this.#draw();
  }

  #fit() {
    if (!this.#map || !this.#frame.clientWidth) return;
    for (const view of [this.#pages, this.#areas]) view.resize(this.#map, this.#frame.clientWidth, HEIGHT);
    this.#isFitted = true;
    if (!this.#isChosen) this.#view = this.#pages.window ? this.#areas : this.#pages;
    this.#tell();
    this.#draw();
  }

  #choose(view) {
    this.#isChosen = true;
    this.#view = view;
    this.#pointed = -1;
    this.#setCursor(document.activeElement === this.#canvas ? 0 : -1);
    this.#tell();
  }

  /** The pages of the owner of an area. */
  #zoomTo(index) {
    const place = this.#areas.placeOf(index);
    if (place >= 0) this.#zoomToPage(this.#map.pages.indexOf(place));
  }

  #zoomToPage(page) {
    if (!this.#map || page < 0) return;
    this.#choose(this.#pages);
    this.#pages.reveal(page);
    this.#setCursor(page);
    this.#tell();
  }

  #noteChanges() {
    this.#areas.update(this.#map);
    this.#pages.update(this.#map);
    if (!calm() && !this.#flashing) this.#flash();
  }

  #flash() {
    this.#flashing = this.#view === this.#pages && this.#pages.flashes;
    this.#draw();
    if (this.#flashing) requestAnimationFrame(() => this.#flash());
  }

  #draw() {
    if (!this.#map || !this.#frame.clientWidth) return;
    const shown = this.#pointed >= 0 ? this.#pointed : this.#cursor;
    const colours = this.#colours();
    this.#view.draw(blank(this.#canvas, this.#frame.clientWidth, HEIGHT), colours, this.#chosen(shown), shown);
    this.#drawBar(colours);
  }

  /** All pages in order, a column of pixels for as many as fall on it; a frame around those that the grid shows. */
  #drawBar(colours) {
    const width = this.#bar.clientWidth;
    const context = blank(this.#bar, width, BAR_HEIGHT);
    const { total } = this.#map;
    context.fillStyle = colours.free;
    context.globalAlpha = 0.25;
    context.fillRect(0, 0, width, BAR_HEIGHT);
    context.globalAlpha = 1;
    for (let page = 0, from = 0; page < total; page += 1) {
      const kind = kindAt(this.#map, page);
      if (page + 1 < total && kindAt(this.#map, page + 1) === kind) continue;
      context.fillStyle = colours[kind];
      const x = (from / total) * width;
      if (kind !== "free") context.fillRect(x, 0, Math.max(1, ((page + 1) / total) * width - x), BAR_HEIGHT);
      from = page + 1;
    }
    const shown = this.#view.window;
    if (!shown) return;
    context.lineWidth = 2;
    context.strokeStyle = colours.ink;
    const [left, right] = shown.map((page) => (page / total) * width);
    context.strokeRect(left + 1, 1, Math.max(2, right - left - 2), BAR_HEIGHT - 2);
  }

  #chosen(item) {
    if (this.#kind) return (_, kind) => kind === this.#kind;
    const place = item < 0 ? -1 : this.#view.placeOf(item);
    return place < 0 || this.#view === this.#areas ? null : (other) => other === place;
  }

  /** The theme's own, read where CSS has resolved them. */
  #colours() {
    const { color, fontFamily } = getComputedStyle(this.#readout);
    const colours = {
      ink: getComputedStyle(document.body).color,
      quiet: color,
      font: fontFamily,
      paper: getComputedStyle(this.#frame.closest(".pane")).backgroundColor,
    };
    for (const [kind, { swatch }] of Object.entries(this.#legend)) colours[kind] = getComputedStyle(swatch).color;
    return colours;
  }

  #point(event) {
    if (!this.#map) return;
    const box = this.#canvas.getBoundingClientRect();
    this.#pointed = this.#view.under(event.clientX - box.left, event.clientY - box.top);
    this.#say(this.#pointed);
  }

  #leave() {
    this.#pointed = -1;
    this.#say(this.#cursor);
  }

  #pageOfBar(event) {
    const box = this.#bar.getBoundingClientRect();
    return this.#map ? Math.min(this.#map.total - 1, Math.floor(((event.clientX - box.left) / box.width) * this.#map.total)) : -1;
  }

  #press(event) {
    if (!this.#map) return;
    if (event.key === "Enter" && this.#view === this.#areas) this.#zoomTo(this.#cursor);
    else if (event.key === "Escape" && this.#view === this.#pages) this.#choose(this.#areas);
    else {
      const wanted = this.#view.step(event.key, this.#cursor);
      if (wanted === undefined) return;
      this.#view.reveal(wanted);
      this.#setCursor(wanted);
      this.#tell();
    }
    event.preventDefault();
  }

  #setCursor(item) {
    this.#cursor = item;
    this.#say(item);
  }

  #say(item) {
    setText(this.#readout, item < 0 || !this.#map ? HINT : this.#view.sentence(item));
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

/** An empty canvas of this many CSS pixels, to draw on. */
function blank(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
