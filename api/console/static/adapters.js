// The table of adapters: searched and paged by the server, so that thousands are no more work than a few.

import { Problem, askJson, inPath, session } from "./api.js";
import { AdapterRow } from "./adapter_row.js";
import { showDetails } from "./adapter_details.js";
import { confirmDelete } from "./confirm.js";
import { byId, debounced, el, note, setText } from "./dom.js";
import { ms, plural } from "./format.js";
import { pulse } from "./pulse.js";

const PAGE = 25;
const AT_ONCE = 4;
const REFRESH_MS = 10_000;
const WARM_MS = 30_000;
const LIST_NEEDS = "The list of adapters needs a key with scope upload or admin";

export function startAdapters() {
  new AdapterTable().start();
}

class AdapterTable {
  #rows = new Map();
  #before = [];
  #after = null;
  #next = null;
  #view = "all";
  #asked = 0;
  #busy = false;

  start() {
    const again = () => this.#first();
    byId("adapters-search").addEventListener("input", debounced(again, 200));
    byId("adapters-next").addEventListener("click", () => this.#go(1));
    byId("adapters-previous").addEventListener("click", () => this.#go(-1));
    byId("adapters-views").addEventListener("change", (event) => {
      this.#view = event.target.value;
      this.#first();
    });
    session.addEventListener("key", again);
    document.addEventListener("adapterschange", () => this.#load());
    pulse.addEventListener("beat", () => this.#heed());
    setInterval(() => document.hidden || this.#busy || this.#load(), REFRESH_MS);
    this.#load();
  }

  #first() {
    this.#before = [];
    this.#after = null;
    byId("adapters-note").replaceChildren();
    this.#load();
  }

  #go(step) {
    if (step > 0 && this.#next) {
      this.#before.push(this.#after);
      this.#after = this.#next;
    } else if (step < 0 && this.#before.length) this.#after = this.#before.pop();
    this.#load();
  }

  async #load() {
    const asked = ++this.#asked;
    this.#busy = true;
    const search = byId("adapters-search").value.trim().toLowerCase();
    try {
      const { data, more } = this.#view === "all" ? await this.#page(search) : await this.#inPool(search);
      if (asked !== this.#asked) return;
      if (!data.length && this.#before.length) return this.#go(-1);
      this.#next = more ? data.at(-1).id : null;
      this.#show(data);
      await this.#fillUse(asked);
    } catch (problem) {
      if (asked === this.#asked) this.#fail(problem);
    }
    if (asked === this.#asked) this.#busy = false;
  }

  async #page(search) {
    const { data, has_more: more } = await askJson("GET", "/v1/adapters", {
      query: { search, limit: PAGE, after: this.#after },
    });
    return { data, more };
  }

  /** Those with pages, a page of them; there are never more than the pool has room for. */
  async #inPool(search) {
    const pool = await askJson("GET", "/v1/pool");
    const ids = [...new Set(pool.adapters.flatMap((adapter) => adapter.ids))]
      .filter((id) => id.includes(search))
      .sort();
    const found = ids.filter((id) => this.#after === null || id > this.#after);
    const shown = found.slice(0, PAGE);
    const records = await inTurns(shown, (id) => askJson("GET", `/v1/adapters/${inPath(id)}`).catch(() => null));
    return { data: records.filter(Boolean), more: found.length > shown.length };
  }

  #show(data) {
    const actions = {
      show: (row) => showDetails(row.id),
      warm: (row) => this.#warm(row),
      pin: (row) => this.#pin(row),
      remove: (row) => this.#remove(row),
    };
    const rows = new Map();
    for (const record of data) {
      const row = this.#rows.get(record.id) ?? new AdapterRow(record, actions);
      row.update(record);
      rows.set(record.id, row);
    }
    const changed = [...rows.keys()].join() !== [...this.#rows.keys()].join();
    this.#rows = rows;
    // Nodes that only change places would lose the focus.
    if (changed) byId("adapters-rows").replaceChildren(...[...rows.values()].map((row) => row.node));
    byId("adapters-table").hidden = false;
    byId("adapters-previous").disabled = this.#before.length === 0;
    byId("adapters-next").disabled = this.#next === null;
    setText(byId("adapters-page"), `Page ${this.#before.length + 1}`);
    const more = this.#next === null ? "" : ", more behind them";
    const none =
      this.#view === "pool"
        ? "None in the pool"
        : byId("adapters-search").value
          ? "None has such an id"
          : "None yet: upload one";
    setText(byId("adapters-about"), rows.size ? `${plural(rows.size, "adapter")} on this page${more}` : none);
    this.#heed();
  }

  async #fillUse(asked) {
    await inTurns([...this.#rows.values()], async (row) => {
      if (asked !== this.#asked) return;
      try {
        const shown = await askJson("GET", `/v1/adapters/${inPath(row.id)}`);
        if (asked === this.#asked) row.setUse(shown);
      } catch (problem) {
        if (problem.status !== 404) throw problem;
      }
    });
  }

  /** What the pool says, which is asked more often. */
  #heed() {
    if (pulse.state !== "live") return;
    const promised = new Set((pulse.pool.promised ?? []).filter((one) => one.pinned).map((one) => one.digest));
    const resident = new Set(
      (pulse.pool.adapters ?? []).filter((one) => one.state === "ready").map((one) => one.digest),
    );
    for (const row of this.#rows.values()) {
      row.setPinned(promised.has(row.record.digest));
      if (resident.has(row.record.digest) && !row.record.corrupt) row.setTier("resident");
    }
  }

  async #warm(row) {
    await this.#act(row.warmButton, `Warming ${row.id}`, async () => {
      const body = { deadline_ms: WARM_MS };
      const { tier, reached, load_ms: loadMs } = await askJson("POST", `/v1/adapters/${inPath(row.id)}:warm`, { body });
      row.setTier(tier);
      return reached
        ? `${row.id} is in the pool${loadMs ? `, loaded in ${ms(loadMs)}` : " already"}`
        : `${row.id} did not reach the pool in time`;
    });
  }

  async #pin(row) {
    const pinned = !row.pinned;
    await this.#act(row.pinButton, pinned ? `Pinning ${row.id}` : `Unpinning ${row.id}`, async () => {
      const { tier } = await askJson("PATCH", `/v1/adapters/${inPath(row.id)}`, { body: { pinned } });
      row.setPinned(pinned);
      row.setTier(tier);
      return pinned ? `${row.id} stays in the pool` : `${row.id} may leave the pool`;
    });
  }

  async #remove(row) {
    const what = plural(row.record.versions.length, "version");
    const agreed = await confirmDelete(
      `Delete ${row.id}?`,
      `Its ${what} and aliases go. Requests that run on it end as they began.`,
    );
    if (!agreed) return row.name.focus();
    await this.#act(null, `Deleting ${row.id}`, async () => {
      const query = agreed.force ? { force: "true" } : {};
      const gone = await askJson("DELETE", `/v1/adapters/${inPath(row.id)}`, { query });
      document.dispatchEvent(new Event("adapterschange"));
      byId("adapters-search").focus();
      const running = gone.requests_running ? `; ${plural(gone.requests_running, "request")} still running` : "";
      return `${row.id} is deleted, ${plural(gone.versions_removed, "version")}${running}`;
    });
  }

  /** Does what a button says; `act` resolves to a sentence of what has come of it. */
  async #act(button, doing, act) {
    const place = byId("adapters-note");
    button?.setAttribute("aria-busy", "true");
    place.replaceChildren(el("p", { class: "quiet" }, `${doing} …`));
    try {
      place.replaceChildren(note("ok", `${await act()}.`));
    } catch (problem) {
      place.replaceChildren(note("bad", `${doing}: ${problem.advice ?? "it failed."}`));
    }
    button?.removeAttribute("aria-busy");
  }

  #fail(problem) {
    const isLost = problem.status === 0 && this.#rows.size > 0;
    if (isLost) return;
    this.#rows.clear();
    byId("adapters-rows").replaceChildren();
    byId("adapters-table").hidden = true;
    const scope = this.#view === "pool" ? "This view needs a key with scope metrics or admin" : LIST_NEEDS;
    const text = problem.status === 403 ? `${scope}.` : problem.advice;
    setText(byId("adapters-about"), problem instanceof Problem ? text : "The list could not be read.");
  }
}

/** `act` for each, a few at a time. */
async function inTurns(items, act) {
  const results = new Array(items.length);
  let next = 0;
  const work = async () => {
    while (next < items.length) {
      const here = next++;
      results[here] = await act(items[here]);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return results;
}
