// The weights of a sum of adapters as sliders, below the field of a model. The field's text is all there is to know: a
// slider writes it, and what is typed moves the sliders (docs/compositions.md).

import { debounced, el, setText } from "./dom.js";

const MOST_PARTS = 4;
const [LOWEST, HIGHEST, STEP] = [-1, 2, 0.05];
/** Each set of weights loads an adapter: one that a slider only passes is not asked for. */
const RESTS_MS = 300;
const NUMBER = /^-?(\d{1,9}(\.\d{0,20})?|\.\d{1,20})$/;

/** `mia+0.5*style` as [{ id, weight }]; nothing where the text is no sum. */
export function parseSum(text) {
  const parts = text.split("+").map((part) => {
    const star = part.lastIndexOf("*");
    const weight = star < 0 ? "1" : part.slice(0, star).trim();
    return { id: part.slice(star + 1).trim(), weight: NUMBER.test(weight) ? Number(weight) : NaN };
  });
  const isSum = parts.length <= MOST_PARTS && parts.every(({ id, weight }) => id && !Number.isNaN(weight));
  return isSum ? parts : [];
}

const words = (parts) => parts.map(({ id, weight }) => (weight === 1 ? id : `${weight}*${id}`));

export class Weights {
  #rows = [];
  #list = el("div", { class: "weights-rows" });
  #stored = el("p", { class: "quiet", hidden: true });
  #command = el("code");

  /** `input` is the model's field, `listId` suggestions for it; `settled` is told when a slider rests. */
  constructor(number, input, listId, settled) {
    this.number = number;
    this.input = input;
    this.settled = debounced(settled, RESTS_MS);
    this.adding = el("input", {
      "aria-label": `Adapter to add to model ${number}`,
      list: listId,
      placeholder: "Another adapter",
      autocomplete: "off",
      spellcheck: "false",
      onkeydown: (event) => event.key === "Enter" && this.#add(),
    });
    this.addButton = el("button", { type: "button", onclick: () => this.#add() }, "Add");
    this.#stored.append("To keep it under a name: ", this.#command);
    this.node = el(
      "details",
      { class: "weights", ontoggle: () => this.show() },
      el("summary", {}, "Weights"),
      this.#list,
      el("div", { class: "weights-add" }, this.adding, this.addButton),
      this.#stored,
    );
    input.addEventListener("input", () => this.show());
  }

  /** Show the field's text. Rows of the same adapters stay: one of them may be under somebody's finger. */
  show() {
    const parts = parseSum(this.input.value);
    if (this.#rows.map((row) => row.id).join("+") !== parts.map(({ id }) => id).join("+")) this.#build(parts);
    parts.forEach(({ weight }, index) => this.#rows[index].show(weight));
    this.addButton.disabled = this.adding.disabled = parts.length === MOST_PARTS;
    this.#stored.hidden = parts.length < 2 && parts[0]?.weight === 1;
    setText(this.#command, `lorasrv compose NAME ${words(parts).join(" ")}`);
  }

  #build(parts) {
    this.#rows = parts.map(({ id }, index) => this.#row(id, index));
    this.#list.replaceChildren(...this.#rows.map((row) => row.node));
  }

  #row(id, index) {
    const value = el("output");
    const slider = el("input", {
      type: "range",
      step: STEP,
      "aria-label": `Weight of ${id} in model ${this.number}`,
      oninput: () => this.#write((parts) => parts.with(index, { id, weight: Number(slider.value) })),
      onchange: () => this.settled(),
    });
    const drop = el(
      "button",
      { type: "button", "aria-label": `Leave ${id} out of model ${this.number}`, onclick: () => this.#drop(index) },
      "×",
    );
    const show = (weight) => {
      slider.min = Math.min(LOWEST, weight);
      slider.max = Math.max(HIGHEST, weight);
      slider.value = weight;
      setText(value, weight.toFixed(2));
      drop.disabled = this.#rows.length === 1;
    };
    return { id, show, node: el("div", { class: "weights-row" }, el("span", {}, id), slider, value, drop) };
  }

  #add() {
    const id = this.adding.value.trim();
    if (!id || this.addButton.disabled) return;
    this.adding.value = "";
    this.#write((parts) => [...parts, { id, weight: 0.5 }]);
  }

  #drop(index) {
    this.#write((parts) => parts.filter((_, at) => at !== index));
    this.adding.focus();
  }

  #write(change) {
    this.input.value = words(change(parseSum(this.input.value))).join("+");
    this.show();
  }
}
