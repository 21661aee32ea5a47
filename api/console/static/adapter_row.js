// One line of the table of adapters. It is made once and then only changed, so that focus stays where it is.

import { el, setText } from "./dom.js";
import { UNKNOWN, bytes, count, rate } from "./format.js";

export const TIERS = {
  resident: ["■", "the pool"],
  host: ["◧", "host memory"],
  disk: ["□", "disk"],
};

export class AdapterRow {
  #cells = {};
  #id;

  /** `actions`: show, warm, pin, remove; each is called with the row. */
  constructor(record, actions) {
    this.#id = record.id;
    const cell = (name, className = null) => (this.#cells[name] = el("td", { class: className }));
    const button = (text, act) =>
      el(
        "button",
        { type: "button", class: "plain", "aria-label": `${text} ${record.id}`, onclick: () => act(this) },
        text,
      );
    this.pinButton = button("Pin", actions.pin);
    this.name = el(
      "button",
      { type: "button", class: "link id", "aria-label": `Details of ${record.id}`, onclick: () => actions.show(this) },
      record.id,
    );
    this.warmButton = button("Warm", actions.warm);
    this.node = el(
      "tr",
      {},
      el("th", { scope: "row" }, this.name),
      cell("tier", "tier"),
      cell("versions"),
      cell("aliases", "aliases"),
      cell("rank", "number"),
      cell("size", "number"),
      cell("requests", "number"),
      cell("speed", "number"),
      el("td", { class: "actions" }, this.warmButton, this.pinButton, button("Delete", actions.remove)),
    );
    this.#cells.tier.append(el("span", { class: "tier-sign", "aria-hidden": "true" }), el("span", {}, UNKNOWN));
    this.update(record);
  }

  get id() {
    return this.#id;
  }

  update(record) {
    this.record = record;
    const current = record.versions.find(({ version }) => version === record.version);
    setText(
      this.#cells.versions,
      record.versions.length > 1 ? `${record.version}, ${record.versions.length} in all` : String(record.version),
    );
    setText(this.#cells.aliases, Object.entries(record.aliases).map(aliasText).join(", ") || UNKNOWN);
    setText(this.#cells.rank, current?.digest ? String(current.rank) : UNKNOWN);
    setText(this.#cells.size, current?.digest ? bytes(current.bytes) : UNKNOWN);
    this.warmButton.disabled = this.pinButton.disabled = !current?.digest;
    this.node.classList.toggle("corrupt", record.corrupt);
    if (record.corrupt) this.setTier("damaged");
  }

  /** What only the adapter's own route tells. */
  setUse({ tier, traffic }) {
    if (!this.record.corrupt) this.setTier(tier);
    setText(this.#cells.requests, count(traffic.requests));
    setText(this.#cells.speed, rate(traffic.tokens_per_s));
  }

  setTier(tier) {
    const [sign, word] = this.record.digest ? (TIERS[tier] ?? ["!", tier ?? "unknown"]) : ["", "no weights"];
    setText(this.#cells.tier.firstChild, sign);
    setText(this.#cells.tier.lastChild, this.pinned ? `${word}, pinned` : word);
    this.#cells.tier.dataset.tier = tier;
    this.tier = tier;
  }

  setPinned(pinned) {
    if (this.pinned === pinned) return;
    this.pinned = pinned;
    setText(this.pinButton, pinned ? "Unpin" : "Pin");
    this.pinButton.setAttribute("aria-label", `${pinned ? "Unpin" : "Pin"} ${this.#id}`);
    if (this.tier) this.setTier(this.tier);
  }
}

/** `prod → 3`, or the shares of a canary. */
export function aliasText([name, target]) {
  if (typeof target === "number") return `${name} → ${target}`;
  const shares = Object.entries(target).map(([version, share]) => `${version} (${Math.round(share * 100)} %)`);
  return `${name} → ${shares.join(" + ")}`;
}
