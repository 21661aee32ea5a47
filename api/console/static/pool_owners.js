// Who has which page of the pool, from what GET /v1/pool says. No drawing here.

/** The four kinds of page, in the order of the legend. */
export const KINDS = {
  kv: { name: "Keys and values", about: "of requests that run" },
  prefix: { name: "Kept prompts", about: "no request uses them, a later one may" },
  adapter: { name: "Adapters", about: "weights in the pool" },
  free: { name: "Free", about: "not in use" },
};

/** A map of one moment: `owners`, and `pages[i]` the place of a page's owner in it, -1 for a free page.
 * `sharers`: pages that several requests hold -> the places of all of them. */
export function layOut(pool) {
  const owners = [];
  const pages = new Int32Array(pool.pages_total).fill(-1);
  const sharers = new Map();
  const put = (owner, runs) => {
    const place = owners.push(owner) - 1;
    for (const [first, number] of runs ?? []) {
      for (let page = first; page < Math.min(first + number, pages.length); page += 1) {
        if (pages[page] < 0) pages[page] = place;
        else sharers.set(page, [...(sharers.get(page) ?? [pages[page]]), place]);
      }
    }
  };
  for (const adapter of pool.adapters ?? []) put(ofAdapter(adapter), adapter.runs);
  for (const request of pool.requests ?? []) put(ofRequest(request), request.runs);
  if (pool.pages_prefix) {
    put({ kind: "prefix", who: "prompts of earlier requests", pages: pool.pages_prefix, more: [] }, pool.prefix_runs);
  }
  return { owners, pages, sharers, counts: countsOf(pool), total: pool.pages_total, blockBytes: pool.block_bytes };
}

function ofAdapter(adapter) {
  const more = [adapter.state === "ready" ? "ready" : "being copied"];
  if (adapter.pinned) more.push("pinned");
  if (adapter.requests) more.push(`${adapter.requests} running on it`);
  if (adapter.runs.length > 1) more.push(`in ${adapter.runs.length} pieces`);
  return { kind: "adapter", who: named(adapter), pages: adapter.pages, more, unready: adapter.state !== "ready" };
}

function ofRequest(request) {
  const model = request.digest === null ? "the base" : named(request);
  const more = [request.digest === null ? model : `on ${model}`];
  if (request.shared) more.push(`${request.shared} shared`);
  return { kind: "kv", who: request.request_id, label: model, pages: request.pages, more };
}

const NAMED = 5;

function named({ ids, digest }) {
  if (!ids.length) return `an adapter without a name (${digest.replace("sha256:", "").slice(0, 12)})`;
  const more = ids.length > NAMED ? ` and ${ids.length - NAMED} more` : "";
  return ids.slice(0, NAMED).join(", ") + more;
}

function countsOf(pool) {
  return { kv: pool.pages_kv, prefix: pool.pages_prefix, adapter: pool.pages_adapters, free: pool.pages_free };
}

/** The kind of a page. */
export const kindAt = (map, page) => (map.pages[page] < 0 ? "free" : map.owners[map.pages[page]].kind);

/** One page in a sentence. */
export function sentence(map, page) {
  const place = map.pages[page];
  if (place < 0) return `Page ${page}: free`;
  const others = map.sharers.get(page)?.length ?? 0;
  const shared = others ? `; ${others} requests share this page` : "";
  return `Page ${page}: ${described(map.owners[place])}${shared}`;
}

/** One owner in a sentence. */
export function ownerSentence(owner) {
  const text = described(owner);
  return text[0].toUpperCase() + text.slice(1);
}

function described(owner) {
  const kind = { kv: "keys and values of request", prefix: "kept", adapter: "adapter" }[owner.kind];
  const size = `${owner.pages} page${owner.pages === 1 ? "" : "s"}`;
  return `${kind} ${owner.who} (${[size, ...owner.more].join(", ")})`;
}
