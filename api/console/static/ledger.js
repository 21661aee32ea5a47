// The ledger of an adapter in words: what it was asked, what that cost, and where its weights were found.

import { facts } from "./dom.js";
import { bytes, count, moment, ms, plural, rate } from "./format.js";

const ENDS = { errors: "failed", refused: "refused", aborted: "aborted", fallbacks: "answered by the base" };
const PLACES = { resident: "in the pool", host: "on the host", disk: "on the disk" };
const FIRST_TOKENS = {
  hot: "First token, adapter in the pool",
  cold: "First token, adapter loaded first",
};

/** A description list of a response of GET /v1/adapters/{id}/stats. */
export function ledgerFacts(stats) {
  return facts(ledgerRows(stats));
}

/** The same as rows: [name, text]; a null text is left out. */
export function ledgerRows(stats) {
  if (!stats.requests && !stats.prompt_tokens) return [["Requests", "none yet"]];
  return [
    ["Requests", [count(stats.requests), ...counted(stats, ENDS)].join(", ")],
    ["First and last", `${moment(stats.first_used)}, ${moment(stats.last_used)}`],
    ["Prompts", `${plural(stats.prompt_tokens, "token")}, ${count(stats.cached_tokens)} from the prefix cache`],
    ["Answers", plural(stats.generated_tokens, "token")],
    ["Drafts", drafts(stats.speculation)],
    ["Compute", `${rate(stats.compute_seconds)} s`],
    ["Adapter was", counted(stats.found ?? {}, PLACES).join(", ") || null],
    ["Loads", `${plural(stats.disk_loads, "file")} read, ${bytes(stats.disk_bytes)}`],
    ["Copies", `${count(stats.pool_copies)} to the pool, ${bytes(stats.pool_bytes)}`],
    ["Held of the pool", `${bytes(stats.resident_byte_hours)} hours`],
    ...Object.entries(FIRST_TOKENS).map(([kind, name]) => [name, firstToken(stats.ttft?.[kind])]),
  ];
}

const counted = (numbers, words) =>
  Object.entries(words)
    .filter(([key]) => numbers[key])
    .map(([key, word]) => `${count(numbers[key])} ${word}`);

const drafts = (told) =>
  told?.drafted
    ? `${count(told.accepted)} of ${plural(told.drafted, "token")} right, ${rate(told.tokens_per_step)} tokens a step`
    : null;

const firstToken = (times) =>
  times?.count ? `${ms(times.p50_ms)} median, ${ms(times.p95_ms)} for 95 % (${plural(times.count, "answer")})` : null;
