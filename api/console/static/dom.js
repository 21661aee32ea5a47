// Elements made from parts. Text always goes in as text: nothing in the console parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (`class`, `onclick` …) and children; null, undefined and false are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** The element of an id; one that is missing is a mistake of ours. */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`no element #${id}`);
  return node;
}

/** Sets text only where it differs: what does not change is not announced again, and selections stay. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Rows of a description list: [name, value] or [name, node]. Values that are null are left out. */
export function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined);
  return el(
    "dl",
    { class: "facts" },
    rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

const NOTE_WORDS = { ok: "Done", warn: "Note", bad: "Refused" };

/** A message box. `kind` is ok, warn or bad; its word is written, not only coloured. */
export function note(kind, title, lines = [], word = NOTE_WORDS[kind]) {
  return el(
    "div",
    { class: `note ${kind}`, role: kind === "bad" ? "alert" : null },
    el("p", { class: "note-title" }, el("b", {}, `${word}: `), title),
    lines.length
      ? el(
          "ul",
          {},
          lines.map((line) => el("li", {}, line)),
        )
      : null,
  );
}

/** `act` once nothing has asked for it for `ms`. */
export function debounced(act, ms) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, ms);
  };
}

/** Whether whoever looks has asked for less motion. */
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
