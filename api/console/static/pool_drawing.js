// Draws a pool map on a canvas. Kinds differ in shape as well as in colour: full, cut, hollow, a dot.

import { squareAt } from "./pool_owners.js";

const LARGEST = 22;
const SMALLEST = 4;
export const FLASH_MS = 700;

/** The grid that shows all pages on `width` x `height` CSS pixels; a square may stand for several pages. */
export function gridFor(total, width, height) {
  for (let size = LARGEST; size >= SMALLEST; size -= 0.5) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(total / columns);
    if (rows * size <= height) return { size, columns, rows, pagesEach: 1, squares: total };
  }
  const columns = Math.max(1, Math.floor(width / SMALLEST));
  const rows = Math.max(1, Math.floor(height / SMALLEST));
  const pagesEach = Math.ceil(total / (columns * rows));
  const squares = Math.ceil(total / pagesEach);
  return { size: SMALLEST, columns, rows: Math.ceil(squares / columns), pagesEach, squares };
}

/** Which square lies under a point; -1 if none does. */
export function squareUnder(grid, x, y) {
  const column = Math.floor(x / grid.size);
  const square = Math.floor(y / grid.size) * grid.columns + column;
  return x >= 0 && y >= 0 && column < grid.columns && square < grid.squares ? square : -1;
}

/** `chosen`: (place, kind) -> whether it stands out, null if all do. `changedAt`: square -> when, for it to flash. */
export function draw(canvas, map, grid, colours, { chosen = null, cursor = -1, changedAt = new Map(), now = 0 } = {}) {
  const ratio = devicePixelRatio || 1;
  const width = grid.columns * grid.size;
  const height = grid.rows * grid.size;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  for (let square = 0; square < grid.squares; square += 1) {
    const { kind, place } = squareAt(map, square, grid.pagesEach);
    const x = (square % grid.columns) * grid.size;
    const y = Math.floor(square / grid.columns) * grid.size;
    context.globalAlpha = chosen === null || chosen(place, kind) ? 1 : 0.22;
    shape(context, kind, x, y, grid.size, colours, map.owners[place], place % 2 === 1);
    const age = now - (changedAt.get(square) ?? -Infinity);
    if (age < FLASH_MS) {
      context.globalAlpha = 0.75 * (1 - age / FLASH_MS);
      context.fillStyle = colours.ink;
      context.fillRect(x + 0.5, y + 0.5, grid.size - 1.5, grid.size - 1.5);
    }
  }
  context.globalAlpha = 1;
  if (cursor >= 0) ring(context, cursor, grid, colours);
}

/** Owners that are neighbours differ a little, so that it is seen where one ends. */
function shape(context, kind, x, y, size, colours, owner, odd) {
  const gap = size >= 7 ? 1.5 : 1;
  const side = size - gap;
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
    if (size >= 7) {
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
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

function ring(context, square, grid, colours) {
  const x = (square % grid.columns) * grid.size;
  const y = Math.floor(square / grid.columns) * grid.size;
  context.lineWidth = 2;
  context.strokeStyle = colours.ink;
  context.strokeRect(x, y, grid.size - 1, grid.size - 1);
}
