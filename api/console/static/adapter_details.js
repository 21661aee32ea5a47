// All that is known of one adapter: versions, aliases, the report of its upload, its verdict, and its ledger.

import { ask, askJson, inPath, parseExactly } from "./api.js";
import { TIERS, aliasText } from "./adapter_row.js";
import { confirmDelete } from "./confirm.js";
import { byId, el, facts, note, setText } from "./dom.js";
import { UNKNOWN, bytes, count, digest, moment, plural, rate } from "./format.js";
import { ledgerFacts } from "./ledger.js";
import { madeText, personaParts } from "./persona.js";
import { verdictParts } from "./verdict.js";

const LIMITS = {
  max_running: (value) => `${count(value)} running at a time`,
  max_queued: (value) => `${count(value)} waiting`,
  tokens_per_s: (value) => `${rate(value)} tokens/s`,
  resident_bytes: (value) => `${bytes(value)} of the pool`,
  weight: (value) => `weight ${value}`,
};

let shownId = null;

export async function showDetails(id) {
  const dialog = byId("details-dialog");
  shownId = id;
  setText(byId("details-title"), id);
  byId("details-body").replaceChildren(el("p", { class: "quiet" }, "Reading …"));
  byId("details-close").onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
  try {
    const [shown, stats] = await Promise.all([describedExactly(id), ledger(id)]);
    if (shownId === id) byId("details-body").replaceChildren(...parts(shown, stats));
  } catch (problem) {
    byId("details-body").replaceChildren(note("bad", problem.advice ?? "It could not be read."));
  }
}

/** An adapter as the server describes it: seeds of its defaults may be larger than a number here can be. */
async function describedExactly(id) {
  const answer = await ask("GET", `/v1/adapters/${inPath(id)}`);
  return parseExactly(await answer.text());
}

/** What the server has counted for an adapter; null where it keeps no ledger, or does not show it to this key. */
async function ledger(id) {
  try {
    return await askJson("GET", `/v1/adapters/${inPath(id)}/stats`);
  } catch {
    return null;
  }
}

function parts(shown, stats) {
  const aliases = Object.entries(shown.aliases).map(aliasText).join(", ");
  const limits = Object.entries(shown.limits)
    .map(([name, value]) => LIMITS[name]?.(value) ?? `${name} ${value}`)
    .join(", ");
  return [
    facts([
      ["Digest", shown.digest ? el("code", { class: "wrap" }, shown.digest) : "no weights: the base answers"],
      ["Tier", shown.digest ? tier(shown) : null],
      ["Created", moment(shown.created)],
      ["Aliases", aliases || "none"],
      ["Limits", limits || "none of its own"],
      [
        "Asked",
        `${count(shown.traffic.requests)} times, ${count(shown.traffic.tokens)} tokens, ${rate(shown.traffic.tokens_per_s)} tokens/s now`,
      ],
    ]),
    el("h3", {}, "Versions"),
    versions(shown),
    el("h3", {}, "Defaults"),
    ...personaParts(shown, (made) => showMade(shown.id, made)),
    ...(shown.report ? [el("h3", {}, "Report of the upload"), ...reportParts(shown.report)] : []),
    ...(shown.digest ? [el("h3", {}, "Verified"), ...verdictParts(shown.id, shown.verified)] : []),
    ...(stats ? [el("h3", {}, "Ledger"), ledgerFacts(stats)] : []),
  ];
}

const tier = (shown) =>
  shown.corrupt ? "damaged on the disk; upload it again" : (TIERS[shown.tier]?.[1] ?? "unknown");

async function showMade(id, made) {
  document.dispatchEvent(new Event("adapterschange"));
  await showDetails(id);
  byId("details-body").prepend(note("ok", madeText(made), made.persona?.warnings ?? []));
}

function versions(shown) {
  const rows = [...shown.versions].reverse().map((version) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(version.version), version.version === shown.version ? " (current)" : ""),
      el("td", {}, version.digest ? el("code", { title: version.digest }, digest(version.digest)) : "none"),
      el("td", {}, version.persona ? el("code", { title: version.persona }, digest(version.persona)) : "none"),
      el("td", {}, moment(version.created)),
      el("td", { class: "number" }, version.digest ? String(version.rank) : UNKNOWN),
      el("td", { class: "number" }, version.digest ? bytes(version.bytes) : UNKNOWN),
      el("td", {}, version.stored),
      el("td", {}, version.corrupt ? "damaged" : "whole"),
      el(
        "td",
        { class: "actions" },
        el(
          "button",
          {
            type: "button",
            class: "plain",
            "aria-label": `Delete version ${version.version}`,
            onclick: () => removeVersion(shown, version),
          },
          "Delete",
        ),
      ),
    ),
  );
  const names = ["Version", "Weights", "Defaults", "Created", "Rank", "Size", "Stored", "State", "Actions"];
  const head = names.map((name) =>
    el("th", { scope: "col", class: ["Rank", "Size"].includes(name) ? "number" : null }, name),
  );
  return el(
    "div",
    { class: "scroll", role: "region", "aria-label": "Versions", tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)),
  );
}

async function removeVersion(shown, version) {
  const name = `${shown.id}@${version.version}`;
  const agreed = await confirmDelete(`Delete ${name}?`, "Requests that run on it end as they began.");
  if (!agreed) return;
  try {
    await askJson("DELETE", `/v1/adapters/${inPath(name)}`, { query: agreed.force ? { force: "true" } : {} });
    document.dispatchEvent(new Event("adapterschange"));
    if (shown.versions.length === 1) byId("details-dialog").close();
    else await showDetails(shown.id);
  } catch (problem) {
    byId("details-body").prepend(note("bad", problem.advice ?? "It failed."));
  }
}

const percent = (share) => `${(100 * share).toFixed(2)} %`;
const drifted = ({ worst, worst_module: module }) => `${percent(worst)} at most (${module})`;

/** The report of an upload: figures, then warnings and notices as lists. */
export function reportParts(report) {
  const range = (least, most) => (least === most ? String(least) : `${least} to ${most}`);
  const figures = facts([
    ["Modules", `${count(report.modules_matched)} of ${count(report.modules_expected)} matched`],
    ["Layers", count(report.layers)],
    ["Rank", range(report.rank_min, report.rank_max)],
    ["Scaling", range(round(report.scaling_min), round(report.scaling_max))],
    ["Type", report.dtype],
    ["Weights", bytes(report.weights_bytes)],
    ["Stored", report.drift ? `int8: ${percent(report.drift.rms)} changed, ${drifted(report.drift)}` : "bf16"],
    ["Norm of B", report.norm_b === null || report.norm_b === undefined ? null : String(round(report.norm_b))],
  ]);
  const listed = [];
  if (report.warnings.length) listed.push(note("warn", plural(report.warnings.length, "warning"), report.warnings));
  if (report.notices?.length) listed.push(note("warn", "read otherwise than written", report.notices));
  return [figures, ...listed];
}

const round = (value) => Number(value.toPrecision(4));
