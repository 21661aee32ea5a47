// One model's side of the try-it box: which model, its answer as it streams, and what the answer cost.

import { TIERS } from "./adapter_row.js";
import { Problem, ask } from "./api.js";
import { el, setText } from "./dom.js";
import { UNKNOWN, count, digest, ms, rate } from "./format.js";
import { events } from "./sse.js";
import { Weights } from "./weights.js";

const ENDS = { stop: "ended by itself", length: "cut at the most tokens", stopped: "stopped by you" };
const FIGURES = ["First token", "Tokens/s", "Tokens", "Found in", "Version", "Waited", "Loaded", "End"];

/** A tier in words; the base is always there. */
const place = (tier) => (tier ? (TIERS[tier]?.[1] ?? tier) : "the base");

export class Lane {
  #cells = {};
  #abort = null;
  #wasAsked = false;
  #output = el("div", { class: "answer", tabindex: "0", role: "region", "aria-busy": "false" });
  #problem = el("p", { class: "problem", role: "alert", hidden: true });

  /**
   * `announce` says a sentence to screen readers; `changed` is told when the lane starts and ends; `askAgain` when its
   * answer is no longer that of its weights.
   */
  constructor(number, listId, announce, changed, askAgain) {
    this.announce = announce;
    this.changed = changed;
    this.input = el("input", {
      id: `lane-${number}`,
      list: listId,
      autocomplete: "off",
      spellcheck: "false",
      required: true,
    });
    this.weights = new Weights(number, this.input, listId, () => this.#wasAsked && askAgain(this));
    this.stopButton = el(
      "button",
      { type: "button", disabled: true, "aria-label": `Stop model ${number}`, onclick: () => this.stop() },
      "Stop",
    );
    this.#output.setAttribute("aria-label", `Answer of model ${number}`);
    const rows = FIGURES.map((name) => {
      this.#cells[name] = el("dd", {}, UNKNOWN);
      return el("div", {}, el("dt", {}, name), this.#cells[name]);
    });
    this.node = el(
      "section",
      { class: "lane", "aria-label": `Model ${number}` },
      el(
        "div",
        { class: "lane-head" },
        el("label", { for: `lane-${number}` }, `Model ${number}`),
        this.input,
        this.stopButton,
      ),
      this.weights.node,
      this.#output,
      this.#problem,
      el("dl", { class: "lane-figures" }, rows),
    );
  }

  get running() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  async run(prompt, maxTokens, temperature) {
    const abort = this.#begin();
    const model = this.input.value.trim();
    const body = {
      model,
      messages: [{ role: "user", content: prompt }],
      max_tokens: maxTokens,
      temperature,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const clock = { sent: performance.now(), first: null, last: null };
    let end = "";
    try {
      const answer = await ask("POST", "/v1/chat/completions", { body, signal: abort.signal });
      this.#set("Found in", place(answer.headers.get("x-adapter-tier")));
      end = await this.#read(answer, clock, abort.signal);
    } catch (problem) {
      if (problem.name === "AbortError") end = "stopped";
      else if (this.#abort === abort) this.#fail(problem);
    }
    // Asked again meanwhile: the lane is the other answer's.
    if (this.#abort !== abort) return;
    this.#set("End", ENDS[end] ?? (end || UNKNOWN));
    this.#finish(model, end);
  }

  async #read(answer, clock, signal) {
    let end = "";
    for await (const chunk of events(answer)) {
      signal.throwIfAborted();
      if (chunk.error) throw new Problem(answer.status, chunk.error);
      const choice = chunk.choices?.[0];
      const { content, reasoning } = choice?.delta ?? {};
      if (reasoning) this.#add(reasoning, clock, this.#reasoning());
      if (content) this.#add(content, clock, this.#output);
      if (choice?.finish_reason) end = choice.finish_reason;
      if (chunk.usage) this.#figures(chunk.usage, clock);
    }
    return end;
  }

  /** The paragraph in front of the answer for what the model writes to reason. */
  #reasoning() {
    return this.#output.querySelector(".reasoning") ?? this.#output.appendChild(el("p", { class: "reasoning" }));
  }

  #add(text, clock, into) {
    clock.last = performance.now();
    if (clock.first === null) {
      clock.first = clock.last;
      this.#set("First token", ms(clock.first - clock.sent));
    }
    const output = this.#output;
    const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 24;
    into.append(text);
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

  #figures(usage, clock) {
    const told = usage.lorasrv ?? {};
    const seconds = clock.first === null ? 0 : (clock.last - clock.first) / 1000;
    this.#set("Tokens", count(usage.completion_tokens));
    if (seconds > 0 && usage.completion_tokens > 1)
      this.#set("Tokens/s", rate((usage.completion_tokens - 1) / seconds));
    const found = told.fallback ? "base, in its place" : place(told.adapter_tier);
    this.#set("Found in", found);
    this.#set(
      "Version",
      told.adapter_digest ? `${told.adapter_version} · ${digest(told.adapter_digest)}` : "base",
      told.adapter_digest,
    );
    this.#set("Waited", ms(told.queue_ms));
    this.#set("Loaded", ms(told.load_ms));
  }

  #set(name, text, title = null) {
    setText(this.#cells[name], text);
    if (title) this.#cells[name].title = title;
    else this.#cells[name].removeAttribute("title");
  }

  #begin() {
    this.stop();
    this.#wasAsked = true;
    this.#abort = new AbortController();
    this.#output.replaceChildren();
    this.#output.setAttribute("aria-busy", "true");
    this.#problem.hidden = true;
    for (const name of FIGURES) this.#set(name, UNKNOWN);
    this.stopButton.disabled = false;
    this.changed();
    return this.#abort;
  }

  #finish(model, end) {
    this.#abort = null;
    this.#output.setAttribute("aria-busy", "false");
    this.stopButton.disabled = true;
    const told = this.#problem.hidden ? `${ENDS[end] ?? end}, ${this.#cells.Tokens.textContent} tokens` : "failed";
    this.announce(`${model}: ${told}.`);
    this.changed();
  }

  #fail(problem) {
    setText(this.#problem, problem instanceof Problem ? problem.advice : "The answer broke off.");
    this.#problem.hidden = false;
  }
}
