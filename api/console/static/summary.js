// The strip of figures at the top, the word for the server's state, and what a screen reader is told of both.

import { byId, el, setText } from "./dom.js";
import { bytes, count, ms, percent, plural, rate } from "./format.js";
import { total } from "./metrics.js";
import { pulse } from "./pulse.js";

const SAY_EVERY_MS = 60_000;
const STATES = {
  starting: ["…", "Connecting"],
  live: ["●", "Live"],
  lost: ["○", "No answer, trying again"],
  key: ["◆", "Needs a key"],
  forbidden: ["◇", "Needs scope metrics"],
};
const TILES = [
  ["Generated", (now) => [rate(now.tokens), "tokens/s"]],
  ["Prompts", (now) => [rate(now.prompt), "tokens/s"]],
  ["Running", (now) => [count(now.running), now.running === 1 ? "request" : "requests"]],
  ["Waiting", (now) => [count(now.waiting), now.loading ? `and ${count(now.loading)} for an adapter` : "for room"]],
  ["First token", (now) => [ms(now.first50), `95 %: ${ms(now.first95)}`]],
  ["Between tokens", (now) => [ms(now.inter50), `95 %: ${ms(now.inter95)}`]],
  [
    "Pool in use",
    (_, pool) => [
      percent(pool.pages_total - pool.pages_free, pool.pages_total),
      `of ${bytes(pool.pages_total * pool.block_bytes)}`,
    ],
  ],
  [
    "In the pool",
    (_, pool, scrape) => [
      count(pool.adapters.length),
      `adapters; host ${bytes(total(scrape, "lorasrv_host_cache_bytes"))}`,
    ],
  ],
];

export function startSummary() {
  const tiles = TILES.map(([name, read]) => {
    const value = el("span", { class: "value" }, "–");
    const unit = el("span", { class: "unit" });
    byId("tiles").append(el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, " ", unit)));
    return { value, unit, read };
  });
  let saidState = null;
  let saidAt = 0;
  pulse.addEventListener("beat", () => {
    const [sign, word] = STATES[pulse.state];
    setText(byId("state-sign"), sign);
    setText(byId("state-word"), word);
    byId("state").dataset.state = pulse.state;
    document.body.dataset.state = pulse.state;
    byId("needs-admin").hidden = pulse.state !== "forbidden";
    byId("needs-key").hidden = pulse.state !== "key";
    byId("overview-body").hidden = pulse.state === "forbidden" || pulse.state === "key";
    if (pulse.state === "live") show(tiles);
    const due = pulse.state === "live" && Date.now() - saidAt >= SAY_EVERY_MS;
    if (pulse.state !== saidState || due) {
      saidAt = Date.now();
      saidState = pulse.state;
      setText(byId("announcer"), spoken(word));
    }
  });
}

function show(tiles) {
  const now = pulse.history.points.at(-1);
  for (const { value, unit, read } of tiles) {
    const [number, words] = read(now, pulse.pool, pulse.scrape);
    setText(value, number);
    setText(unit, words);
  }
}

/** What is read aloud: when the state changes, and else once a minute. */
function spoken(word) {
  if (pulse.state !== "live") return `Server: ${word}.`;
  const now = pulse.history.points.at(-1);
  const used = percent(pulse.pool.pages_total - pulse.pool.pages_free, pulse.pool.pages_total);
  const speed = now.tokens === null ? "" : `${rate(now.tokens)} tokens a second, `;
  const busy = `${plural(now.running, "request")} running, ${count(now.waiting + now.loading)} waiting`;
  return `Server live. ${speed}${busy}, pool ${used} in use.`;
}
