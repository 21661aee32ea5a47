// The try-it box: the same prompt to two models at once, each with its own stream.

import { askJson, session } from "./api.js";
import { byId, debounced, el, setText } from "./dom.js";
import { Lane } from "./lane.js";

const LISTED = 20;

export function startTryIt() {
  const status = byId("try-status");
  const announce = (text) => setText(status, text);
  const lanes = [1, 2].map((number) => new Lane(number, `models-${number}`, announce, update, askOne));
  const lists = [1, 2].map((number) => el("datalist", { id: `models-${number}` }));
  byId("lanes").append(...lanes.map((lane) => lane.node), ...lists);

  function update() {
    const running = lanes.some((lane) => lane.running);
    byId("try-stop").disabled = !running;
    setText(byId("try-run"), running ? "Ask again" : "Ask both");
  }

  function askOne(lane) {
    const [prompt, tokens, temperature] = ["try-prompt", "try-tokens", "try-temperature"].map((id) => byId(id).value);
    if (lane.input.reportValidity()) lane.run(prompt, Number(tokens), Number(temperature));
  }

  byId("try-form").addEventListener("submit", (event) => {
    event.preventDefault();
    lanes.forEach(askOne);
  });
  byId("try-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try-form").requestSubmit();
  });
  byId("try-stop").addEventListener("click", () => lanes.forEach((lane) => lane.stop()));
  lanes.forEach((lane, index) => {
    const suggest = debounced(() => fillList(lists[index], lane.input.value), 200);
    lane.input.addEventListener("input", suggest);
    // Else the list would have nothing but what is in the field already.
    for (const field of [lane.input, lane.weights.adding])
      field.addEventListener("focus", () => fillList(lists[index], ""));
  });
  const begin = () => chooseFirst(lanes, lists);
  session.addEventListener("key", begin);
  document.addEventListener("adapterschange", () => lanes.some((lane) => !lane.input.value) && begin());
  begin();
}

async function fillList(list, search) {
  try {
    const { data } = await askJson("GET", "/v1/models", { query: { search: search.toLowerCase(), limit: LISTED } });
    list.replaceChildren(...data.map(({ id }) => el("option", { value: id })));
    return data.map(({ id }) => id);
  } catch {
    return [];
  }
}

/** Two different models to begin with: adapters if there are some. */
async function chooseFirst(lanes, lists) {
  const ids = await fillList(lists[0], "");
  lists[1].replaceChildren(...ids.map((id) => el("option", { value: id })));
  const [base, first, second] = ids;
  const wanted = second ? [first, second] : [base, first ?? base];
  lanes.forEach((lane, index) => {
    if (!lane.input.value && wanted[index]) lane.input.value = wanted[index];
    lane.weights.show();
  });
}
