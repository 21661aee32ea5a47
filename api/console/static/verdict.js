// The verdict of `lorasrv verify` in words: whether the server computes an adapter as PEFT does, and how far off it is.

import { el, facts, note } from "./dom.js";
import { bytes, count, moment, plural, rate } from "./format.js";

// [kind of the note, its word, what it means], as in docs/verify.md.
const VERDICTS = {
  exact: ["ok", "Exact", "what PEFT computes, but for the order of sums"],
  within: ["ok", "Within rounding", "what PEFT computes, but for rounding"],
  differs: ["bad", "Differs", "not what PEFT computes"],
};

/** What there is to say of the verdict of an adapter's current version; null where it has none. */
export function verdictParts(id, verified) {
  if (!verified) return [el("p", {}, "Not yet: ", el("code", {}, `lorasrv verify ${id}`), " compares it with PEFT.")];
  const [kind, word, meaning] = VERDICTS[verified.verdict] ?? ["warn", verified.verdict, "a verdict unknown here"];
  const title = `${meaning}. Version ${verified.version}, ${moment(verified.created)}`;
  return [
    note(kind, title, [...verified.reasons, ...verified.notes], word),
    el("details", {}, el("summary", {}, "Figures"), facts(verdictRows(verified))),
  ];
}

/** The figures as rows: [name, text]; a null text is left out. */
export function verdictRows({ adapter_error, base_error, effect, linears, computed_with, ...verified }) {
  const { positions } = adapter_error;
  return [
    ["Logits with the adapter", off(adapter_error)],
    ["Logits without it", off(base_error)],
    ["Same likeliest token", `${same(adapter_error)} with the adapter, ${same(base_error)} without`],
    [
      "Effect of the adapter",
      `${figure(effect.rms)} rms, ${figure(effect.max_abs)} at most; ${count(effect.tokens_changed)} of ${plural(positions, "likeliest token")} changed`,
    ],
    ["Linears", `${count(linears.adapted)} of ${count(linears.compared)} adapted`],
    ["Worst linear", `${linears.worst}, off by ${figure(linears.max_error)}; up to ${figure(linears.limit)} is rounding`],
    ["Wrong linears", linears.num_wrong ? `${count(linears.num_wrong)}: ${linears.wrong.join(", ")}` : null],
    [
      "Computed with",
      `${computed_with.model}, weights ${computed_with.quantization}, adapter ${computed_with.dtype}, ${computed_with.kernels} kernels`,
    ],
    ["Prompts", `${plural(verified.prompts, "prompt")}, ${plural(verified.new_tokens, "new token")} each`],
    [
      "Took",
      `${rate(verified.seconds)} s, ${rate(verified.cpu_seconds)} s of one processor, ${bytes(verified.peak_bytes)}`,
    ],
  ];
}

const figure = (value) => String(Number(value.toPrecision(3)));

const off = (errors) => `off by ${figure(errors.rms)} rms, ${figure(errors.max_abs)} at most`;

const same = (errors) => `${count(errors.greedy_equal)} of ${count(errors.positions)}`;
