// Figures over time, from successive scrapes of /metrics. The names are those of api/cli/top_figures.py.

/** How far back charts go, and which answers count for a quantile of this moment. */
export const SHOWN_MS = 5 * 60_000;
export const WINDOW_MS = 30_000;

const LINE = /^(lorasrv_\w+)(\{.*\})? ([^ ]+)/;
const COUNTER = /^lorasrv_(?!adapter_)\w+_(total|count)$/;
const LE = /[{,]le="([^"]+)"/;
const LATENCIES = { first: "lorasrv_time_to_first_token_seconds", inter: "lorasrv_inter_token_seconds" };

/** Prometheus text -> { totals: name -> sum over labels, buckets: name -> (bound -> count) }. */
export function parse(text) {
  const totals = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const value = Number(found[3]);
    if (!Number.isFinite(value)) continue;
    const name = found[1];
    if (name.endsWith("_bucket")) {
      const le = LE.exec(found[2] ?? "");
      if (!le) continue;
      const stem = name.slice(0, -"_bucket".length);
      if (!buckets.has(stem)) buckets.set(stem, new Map());
      const bound = le[1] === "+Inf" ? Infinity : Number(le[1]);
      buckets.get(stem).set(bound, (buckets.get(stem).get(bound) ?? 0) + value);
    } else totals.set(name, (totals.get(name) ?? 0) + value);
  }
  return { totals, buckets };
}

/** Of durations counted up to bounds, evenly spread between two, as Prometheus has it; null if nothing was counted. */
export function quantile(counts, share) {
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const all = bounds.length ? counts.get(bounds.at(-1)) : 0;
  if (!(all > 0)) return null;
  let lower = 0;
  let below = 0;
  for (const bound of bounds) {
    const here = counts.get(bound);
    if (here >= share * all) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (share * all - below)) / Math.max(1e-9, here - below);
    }
    lower = bound;
    below = here;
  }
  return lower;
}

/** The points of the last minutes. A point without figures is a gap: the server was away, or had been restarted. */
export class History {
  points = [];
  #scrapes = [];

  /** A scrape of the moment `at` (ms), parsed; its point. */
  add(at, scrape) {
    const before = this.#scrapes.at(-1);
    if (before && hasFallen(scrape, before.scrape)) this.#forget(at - 1);
    this.#scrapes = this.#scrapes.filter((old) => at - old.at <= SHOWN_MS);
    const last = this.#scrapes.at(-1);
    const oldest = this.#scrapes.find((old) => at - old.at <= WINDOW_MS) ?? last;
    this.#scrapes.push({ at, scrape });
    return this.#put({ at, ...figures(at, scrape, last, oldest) });
  }

  /** The server did not answer at the moment `at`. What it counts may begin anew, so rates do too. */
  addGap(at) {
    this.#forget(at);
  }

  #forget(at) {
    this.#scrapes = [];
    if (this.points.length && !this.points.at(-1).gap) this.#put({ at, gap: true });
  }

  #put(point) {
    this.points = this.points.filter((old) => point.at - old.at <= SHOWN_MS);
    this.points.push(point);
    return point;
  }
}

function figures(at, scrape, last, oldest) {
  const rate = (name) =>
    last ? (1000 * (total(scrape, name) - total(last.scrape, name))) / Math.max(1, at - last.at) : null;
  const shown = {
    tokens: rate("lorasrv_generated_tokens_total"),
    prompt: rate("lorasrv_prompt_tokens_total"),
    running: total(scrape, "lorasrv_requests_running"),
    waiting: total(scrape, "lorasrv_requests_waiting"),
    loading: total(scrape, "lorasrv_requests_waiting_for_adapter"),
  };
  for (const [short, name] of Object.entries(LATENCIES)) {
    const counts = recent(scrape, oldest?.scrape, name);
    for (const share of [50, 95]) {
      const seconds = quantile(counts, share / 100);
      shown[`${short}${share}`] = seconds === null ? null : 1000 * seconds;
    }
  }
  return shown;
}

function recent(scrape, before, name) {
  const earlier = before?.buckets.get(name);
  const counts = new Map();
  for (const [bound, value] of scrape.buckets.get(name) ?? []) counts.set(bound, value - (earlier?.get(bound) ?? 0));
  return before ? counts : new Map();
}

/** Whether a counter is less than before: the server has restarted. Adapters' series come and go. */
const hasFallen = (scrape, before) =>
  [...before.totals].some(([name, value]) => COUNTER.test(name) && total(scrape, name) < value);

/** A metric's value, summed over its labels; 0 if the server does not have it. */
export const total = (scrape, name) => scrape.totals.get(name) ?? 0;
