// The pool as a grid: one square for each page, and a window onto pools that are too large for squares to be seen.
// Kinds differ in shape as well as in colour: full, cut, hollow, a dot.

import { kindAt, sentence } from "./pool_owners.js";

const LARGEST = 22;
const SMALLEST = 7;
/** Of a window, which has been zoomed in to. */
const ZOOMED = 16;
export const FLASH_MS = 700;
const STEPS = {
  ArrowLeft: () => -1,
  ArrowRight: () => 1,
  ArrowUp: (grid) => -grid.columns,
  ArrowDown: (grid) => grid.columns,
};

/** The grid of `width` x `height` CSS pixels that shows all pages, or as many as can be told apart. */
export function gridFor(total, width, height) {
  const columnsOf = (size) => Math.max(1, Math.floor(width / size));
  let size = LARGEST;
  while (size >= SMALLEST && Math.ceil(total / columnsOf(size)) * size > height) size -= 0.5;
  if (size < SMALLEST) size = ZOOMED;
  const columns = columnsOf(size);
  const squares = Math.min(total, columns * Math.max(1, Math.floor(height / size)));
  return { size, columns, rows: Math.ceil(squares / columns), squares };
}

/** Which square lies under a point; -1 if none does. */
export function squareUnder(grid, x, y) {
  const column = Math.floor(x / grid.size);
  const square = Math.floor(y / grid.size) * grid.columns + column;
  return x >= 0 && y >= 0 && column < grid.columns && square < grid.squares ? square : -1;
}

/** The first page of a window that shows `page`: whole rows, moved from `first` only if necessary. */
export function windowAt(grid, total, first, page) {
  const rowOf = (one) => Math.floor(one / grid.columns);
  const last = rowOf(total - 1) - grid.rows + 1;
  const isShown = page >= first && page < first + grid.squares;
  const row = isShown ? rowOf(first) : rowOf(page) - Math.floor(grid.rows / 3);
  return Math.max(0, Math.min(last, row)) * grid.columns;
}

/** What the map shows and asks of a grid. Its items are pages. */
export class PageView {
  #map;
  #grid;
  #first = 0;
  #changedAt = new Map();

  resize(map, width, height) {
    this.#grid = gridFor(map.total, width, height);
    this.#first = windowAt(this.#grid, map.total, this.#first, this.#first);
    this.#changedAt.clear();
    this.#map = map;
  }

  update(map) {
    const now = performance.now();
    for (let page = this.#first; page < this.#end; page += 1) {
      if (kindAt(this.#map, page) !== kindAt(map, page)) this.#changedAt.set(page, now);
    }
    this.#map = map;
  }

  get about() {
    return this.#grid.squares < this.#map.total ? ` Pages ${this.#first} to ${this.#end - 1} are shown.` : "";
  }

  get window() {
    return this.#grid.squares < this.#map.total ? [this.#first, this.#end] : null;
  }

  get flashes() {
    const now = performance.now();
    for (const [page, at] of this.#changedAt) if (now - at >= FLASH_MS) this.#changedAt.delete(page);
    return this.#changedAt.size > 0;
  }

  get #end() {
    return Math.min(this.#map.total, this.#first + this.#grid.squares);
  }

  reveal(page) {
    this.#first = windowAt(this.#grid, this.#map.total, this.#first, page);
  }

  under(x, y) {
    const square = squareUnder(this.#grid, x, y);
    return square < 0 || this.#first + square >= this.#map.total ? -1 : this.#first + square;
  }

  placeOf(page) {
    return this.#map.pages[page];
  }

  sentence(page) {
    return sentence(this.#map, page);
  }

  /** The page that a key leads to; undefined for other keys. */
  step(key, page) {
    const last = this.#map.total - 1;
    const step = STEPS[key]?.(this.#grid);
    const other = { Home: 0, End: last, PageUp: this.#otherOwner(page, -1), PageDown: this.#otherOwner(page, 1) }[key];
    const wanted = other ?? (step && page + step);
    return wanted === undefined ? undefined : Math.min(last, Math.max(0, wanted));
  }

  /** The next page of another owner: one key press from adapter to adapter. */
  #otherOwner(page, step) {
    const { pages, total } = this.#map;
    let next = page + step;
    while (next > 0 && next < total - 1 && pages[next] === pages[page]) next += step;
    return next;
  }

  draw(context, colours, chosen, cursor) {
    const { size, columns } = this.#grid;
    const now = performance.now();
    const at = (page) => [((page - this.#first) % columns) * size, Math.floor((page - this.#first) / columns) * size];
    for (let page = this.#first; page < this.#end; page += 1) {
      const place = this.#map.pages[page];
      const [x, y] = at(page);
      context.globalAlpha = chosen === null || chosen(place, kindAt(this.#map, page)) ? 1 : 0.22;
      shape(context, kindAt(this.#map, page), x, y, size, colours, this.#map.owners[place], place % 2 === 1);
      const age = now - (this.#changedAt.get(page) ?? -Infinity);
      if (age < FLASH_MS) {
        context.globalAlpha = 0.75 * (1 - age / FLASH_MS);
        context.fillStyle = colours.ink;
        context.fillRect(x + 0.5, y + 0.5, size - 1.5, size - 1.5);
      }
    }
    context.globalAlpha = 1;
    if (cursor < this.#first || cursor >= this.#end) return;
    const [x, y] = at(cursor);
    context.lineWidth = 2;
    context.strokeStyle = colours.ink;
    context.strokeRect(x, y, size - 1, size - 1);
  }
}

/** Owners that are neighbours differ a little, so that it is seen where one ends. */
function shape(context, kind, x, y, size, colours, owner, odd) {
  const side = size - 1.5;
  context.fillStyle = context.strokeStyle = colours[kind];
  if (kind === "free") {
    const dot = Math.max(1, size / 7);
    context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
  } else if (kind === "prefix") {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + side, y);
    context.lineTo(x, y + side);
    context.fill();
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  } else if (kind === "adapter") {
    const line = owner?.unready ? 1 : Math.max(1, side / 3.6);
    context.lineWidth = line;
    if (odd) context.globalAlpha *= 0.62;
    context.strokeRect(x + line / 2, y + line / 2, side - line, side - line);
  } else {
    if (odd) context.globalAlpha *= 0.68;
    context.fillRect(x, y, side, side);
  }
}
