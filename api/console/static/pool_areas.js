// The pool as areas: a rectangle for each owner, as large as the pages it has. Free pages are left to the bar above, or
// they would be nearly all of a large pool. Kinds differ in more than colour: full, hatched, framed.

import { ownerSentence } from "./pool_owners.js";

const GAP = 2;
/** Least share of the width that a kind gets, so that a few pages of it can be seen and pointed at. */
const LEAST_SHARE = 0.14;
const ORDER = ["kv", "prefix", "adapter"];
const LINE_PX = 15;
const PADDING = 6;
const LEAST_CHARS = 4;

/** Rectangles of `box` with areas in proportion to the weights, as square as possible (Bruls et al., 2000).
 * `items`: [{ weight, … }], the heaviest first. */
export function tile(items, box) {
  const scale = (box.w * box.h) / items.reduce((sum, { weight }) => sum + weight, 0);
  const tiles = [];
  let { x, y, w, h } = box;
  for (let start = 0; start < items.length; ) {
    const side = Math.min(w, h);
    const end = endOfStrip(items, start, side, scale);
    const strip = items.slice(start, end);
    const depth = (strip.reduce((sum, { weight }) => sum + weight, 0) * scale) / side;
    let along = 0;
    for (const item of strip) {
      const length = (item.weight * scale) / depth;
      tiles.push({
        ...item,
        ...(w >= h ? { x, y: y + along, w: depth, h: length } : { x: x + along, y, w: length, h: depth }),
      });
      along += length;
    }
    if (w >= h) [x, w] = [x + depth, w - depth];
    else [y, h] = [y + depth, h - depth];
    start = end;
  }
  return tiles;
}

/** A strip takes items as long as its worst rectangle becomes more square by it. */
function endOfStrip(items, start, side, scale) {
  let sum = 0;
  let worst = Infinity;
  let end = start;
  for (; end < items.length; end += 1) {
    const total = sum + items[end].weight * scale;
    const square = (side / total) ** 2;
    const next = Math.max(square * items[start].weight * scale, 1 / (square * items[end].weight * scale));
    if (next > worst) break;
    worst = next;
    sum = total;
  }
  return end;
}

/** A band for each kind that has pages, tiled by its owners: [{ place, kind, x, y, w, h }]. */
export function areasOf(map, width, height) {
  const bands = ORDER.map((kind) =>
    map.owners
      .map((owner, place) => ({ place, kind: owner.kind, weight: owner.pages }))
      .filter((item) => item.kind === kind && item.weight > 0)
      .sort((a, b) => b.weight - a.weight),
  ).filter((band) => band.length);
  const pages = bands.map((band) => band.reduce((sum, { weight }) => sum + weight, 0));
  const all = pages.reduce((sum, number) => sum + number, 0);
  const shares = pages.map((number) => Math.max(LEAST_SHARE, number / all));
  const unit = width / shares.reduce((sum, share) => sum + share, 0);
  let x = 0;
  return bands.flatMap((band, index) => {
    const box = { x, y: 0, w: shares[index] * unit, h: height };
    x += box.w;
    return tile(band, box);
  });
}

/** What the map shows and asks of areas. Its items are indices of areas. */
export class AreaView {
  window = null;
  flashes = false;
  #map;
  #areas = [];
  #size = [0, 0];

  resize(map, width, height) {
    this.#size = [width, height];
    this.update(map);
  }

  update(map) {
    this.#map = map;
    this.#areas = areasOf(map, ...this.#size);
  }

  get about() {
    return " Each area is an owner; free pages are in the bar only.";
  }

  reveal() {}

  under(x, y) {
    return this.#areas.findIndex((area) => x >= area.x && x < area.x + area.w && y >= area.y && y < area.y + area.h);
  }

  placeOf(index) {
    return this.#areas[index]?.place ?? -1;
  }

  sentence(index) {
    const owner = this.#map.owners[this.placeOf(index)];
    return owner ? ownerSentence(owner) : "Nothing is in the pool: every page is free.";
  }

  step(key, index) {
    const last = Math.max(0, this.#areas.length - 1);
    const [previous, next] = [index - 1, index + 1];
    const wanted = {
      ...{ ArrowLeft: previous, ArrowUp: previous, PageUp: previous, Home: 0 },
      ...{ ArrowRight: next, ArrowDown: next, PageDown: next, End: last },
    }[key];
    return wanted === undefined ? undefined : Math.min(last, Math.max(0, wanted));
  }

  draw(context, colours, chosen, cursor) {
    this.#areas.forEach((area, index) => {
      context.globalAlpha = chosen === null || chosen(area.place, area.kind) ? 1 : 0.3;
      const box = [area.x + GAP / 2, area.y + GAP / 2, Math.max(1, area.w - GAP), Math.max(1, area.h - GAP)];
      const owner = this.#map.owners[area.place];
      fill(context, area.kind, box, colours, owner);
      label(context, area.kind, box, colours, owner);
      if (index !== cursor) return;
      context.globalAlpha = 1;
      context.lineWidth = 2;
      context.strokeStyle = colours.ink;
      context.strokeRect(box[0] + 1, box[1] + 1, Math.max(1, box[2] - 2), Math.max(1, box[3] - 2));
    });
    context.globalAlpha = 1;
  }
}

function fill(context, kind, [x, y, w, h], colours, owner) {
  const alpha = context.globalAlpha;
  context.fillStyle = context.strokeStyle = colours[kind];
  if (kind !== "kv") context.globalAlpha = alpha * 0.16;
  context.fillRect(x, y, w, h);
  context.globalAlpha = alpha;
  if (kind === "prefix") {
    context.save();
    context.beginPath();
    context.rect(x, y, w, h);
    context.clip();
    context.globalAlpha = alpha * 0.4;
    context.lineWidth = 1;
    context.beginPath();
    for (let along = -h; along < w; along += 8) {
      context.moveTo(x + along, y + h);
      context.lineTo(x + along + h, y);
    }
    context.stroke();
    context.restore();
  }
  if (kind === "kv") return;
  context.lineWidth = kind === "adapter" && !owner.unready ? 2 : 1;
  context.strokeRect(x + 1, y + 1, Math.max(1, w - 2), Math.max(1, h - 2));
}

/** Name and pages, where there is room for them; of a request the model's name, which says more than its id. */
function label(context, kind, [x, y, w, h], colours, owner) {
  const room = w - 2 * PADDING;
  if (h < LINE_PX + PADDING || room < 24) return;
  context.fillStyle = kind === "kv" ? colours.paper : colours.ink;
  context.font = `12px ${colours.font}`;
  context.textBaseline = "top";
  const pages = `${owner.pages} page${owner.pages === 1 ? "" : "s"}`;
  const name = clipped(context, owner.label ?? owner.who, room);
  const lines = [name, context.measureText(pages).width <= room ? pages : String(owner.pages)].filter(Boolean);
  lines.slice(0, Math.floor((h - PADDING) / LINE_PX)).forEach((text, line) => {
    context.fillText(text, x + PADDING, y + PADDING + line * LINE_PX);
  });
}

/** As much of a text as there is room for; nothing if that is too little to be read. */
function clipped(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let [end, tooFar] = [0, text.length];
  while (end + 1 < tooFar) {
    const middle = (end + tooFar) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width > room) tooFar = middle;
    else end = middle;
  }
  return end < LEAST_CHARS ? "" : `${text.slice(0, end)}…`;
}
