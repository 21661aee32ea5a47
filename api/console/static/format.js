// Numbers as people read them. `–` stands for what is not known.

export const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : UNKNOWN);

/** Tokens a second and the like: a decimal while it says something. */
export const rate = (value) => (known(value) ? (value < 99.95 ? tenth : whole).format(value) : UNKNOWN);

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${(unit && value < 99.95 ? tenth : whole).format(value)} ${UNITS[unit]}`;
}

/** Milliseconds, from ten seconds on seconds. */
export function ms(value) {
  if (!known(value)) return UNKNOWN;
  return value < 10_000 ? `${(value < 9.95 ? tenth : whole).format(value)} ms` : `${tenth.format(value / 1000)} s`;
}

/** The same at an axis, where there is little room. */
export const msTick = (value) =>
  value < 1000 ? `${whole.format(value)} ms` : `${Number((value / 1000).toPrecision(2))} s`;

export const percent = (part, all) => (all > 0 ? `${tenth.format((100 * part) / all)} %` : UNKNOWN);

/** A digest that people can compare: twelve digits. */
export const digest = (value) => (value ? value.replace("sha256:", "").slice(0, 12) : UNKNOWN);

export const moment = (unixSeconds) =>
  known(unixSeconds) ? new Date(unixSeconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : UNKNOWN;

export const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
