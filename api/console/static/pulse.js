// The one clock of the console: asks for /metrics and /v1/pool again and again, and tells everybody what came.

import { ask, askJson, session } from "./api.js";
import { History, parse } from "./metrics.js";

const EVERY_MS = 2000;
const HIDDEN_EVERY_MS = 10_000;
const PATIENCE_MS = 8000;
const MOST_MS = 15_000;

/** Fires `beat` after each round; `state` is one of starting, live, lost, key, forbidden. */
class Pulse extends EventTarget {
  state = "starting";
  history = new History();
  pool = null;
  scrape = null;
  #failures = 0;
  #timer = 0;
  #round = 0;

  start() {
    session.addEventListener("key", () => this.#now());
    document.addEventListener("visibilitychange", () => document.hidden || this.#now());
    this.#now();
  }

  /** Ask at once; a round that is still under way tells nobody. */
  #now() {
    clearTimeout(this.#timer);
    this.#failures = 0;
    this.#beat();
  }

  async #beat() {
    const round = ++this.#round;
    const state = await this.#ask(round);
    if (round !== this.#round) return;
    this.state = state;
    this.#failures = state === "lost" ? this.#failures + 1 : 0;
    if (state !== "live") this.history.addGap(Date.now());
    this.dispatchEvent(new Event("beat"));
    const every = document.hidden || state === "forbidden" || state === "key" ? HIDDEN_EVERY_MS : EVERY_MS;
    this.#timer = setTimeout(() => this.#beat(), Math.min(MOST_MS, every * 1.6 ** this.#failures));
  }

  async #ask(round) {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    try {
      const answers = [
        ask("GET", "/metrics", { signal }).then((answer) => answer.text()),
        askJson("GET", "/v1/pool", { signal }),
      ];
      const [text, pool] = await Promise.all(answers);
      if (round !== this.#round) return this.state;
      this.pool = pool;
      this.scrape = parse(text);
      this.history.add(Date.now(), this.scrape);
      return "live";
    } catch (problem) {
      if (problem.status === 401) return "key";
      if (problem.status === 403) return "forbidden";
      return "lost";
    }
  }
}

export const pulse = new Pulse();
