// The defaults of a version: shown as a person reads them, and edited as a new version of the same weights.

import { Problem, askJson, inPath, parseExactly } from "./api.js";
import { el, facts, note } from "./dom.js";
import { digest, plural } from "./format.js";

const MODES = {
  default: "replaces it",
  prepend: "follows it",
  lock: "is refused",
};
const SHOWN_APART = ["name", "system", "examples", "greetings"];

/** What stands under "Defaults" for a response of GET /v1/adapters/{id}; `done` gets the answer to a new version. */
export function personaParts(shown, done) {
  const { persona } = shown;
  if (persona && !persona.defaults) return [facts(summary(persona)), note("warn", hidden(persona))];
  const place = el("div", {});
  const edit = el("button", { type: "button" }, persona ? "Edit as a new version" : "Give it defaults");
  const close = () => {
    place.replaceChildren();
    edit.focus();
  };
  edit.addEventListener("click", () => {
    place.replaceChildren(editor(shown, close, done));
    place.querySelector("textarea").focus();
  });
  const known = persona
    ? [facts([...summary(persona), ...defaultRows(persona.defaults)])]
    : [el("p", { class: "quiet" }, "None: requests say all themselves.")];
  return [...known, el("div", { class: "buttons" }, edit), place];
}

const hidden = ({ fields }) => `it sets ${fields.join(", ")}; only its owner and administrators see how`;

const summary = (persona) => [
  ["Name", persona.name],
  ["Defaults", el("code", { title: persona.digest }, digest(persona.digest))],
  ...persona.greetings.map((text) => ["Greets", lines(text)]),
];

/** Rows for the fields that the persona has: [name, text]. */
export function defaultRows(defaults) {
  const system = prompt(defaults);
  const rows = system.text ? [[`System prompt; a client's own ${MODES[system.mode]}`, lines(system.text)]] : [];
  for (const dialogue of defaults.examples ?? [])
    rows.push(["Example", lines(dialogue.map(({ role, content }) => `${role}: ${content}`).join("\n"))]);
  const others = Object.entries(defaults).filter(([name]) => !SHOWN_APART.includes(name));
  return [...rows, ...others.map(([name, value]) => [name, el("code", { class: "wrap" }, JSON.stringify(value))])];
}

const lines = (text) => el("span", { class: "lines" }, text);

/** The system prompt of defaults, which may be a text alone. */
export function prompt({ system }) {
  return typeof system === "string" ? { text: system, mode: "default" } : { text: "", mode: "default", ...system };
}

/** Defaults with this prompt and these other fields; in the form that they had if nothing else has changed. */
export function withPrompt(before, { text, mode }, rest) {
  if (!text) return rest;
  const isText = mode === "default" && typeof (before.system ?? "") === "string";
  return { ...rest, system: isText ? text : { text, mode } };
}

function editor(shown, close, done) {
  const before = shown.persona?.defaults ?? {};
  const { system: _, ...others } = before;
  const system = prompt(before);
  const text = el("textarea", { id: "persona-system", rows: 6 }, system.text);
  const mode = el(
    "select",
    { id: "persona-mode" },
    Object.entries(MODES).map(([value, word]) => el("option", { value, selected: value === system.mode }, word)),
  );
  const rest = el("textarea", { id: "persona-rest", rows: 10, spellcheck: "false" }, JSON.stringify(others, null, 2));
  const said = el("div", { "aria-live": "polite" });
  const save = el("button", { type: "submit" }, "Save as a new version");
  const form = el(
    "form",
    { "aria-label": "Defaults" },
    field("System prompt", text),
    field("A client's own system message …", mode),
    field("Everything else, as JSON", rest),
    el("div", { class: "buttons" }, save, el("button", { type: "button", onclick: close }, "Leave it")),
    said,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    save.disabled = true;
    try {
      const body = withPrompt(before, { text: text.value, mode: mode.value }, object(rest.value));
      const path = `/v1/adapters/${inPath(`${shown.id}@${shown.version}`)}/defaults`;
      done(await askJson("PUT", path, { body, ifMatch: shown.etag }));
    } catch (problem) {
      said.replaceChildren(refusal(problem));
    }
    save.disabled = false;
  });
  return form;
}

const field = (name, control) => el("div", { class: "field" }, el("label", { for: control.id }, name), control);

function object(text) {
  let found;
  try {
    found = parseExactly(text.trim() || "{}");
  } catch (error) {
    throw new Problem(400, { message: `Everything else is not JSON: ${error.message}` });
  }
  if (found === null || typeof found !== "object" || Array.isArray(found))
    throw new Problem(400, { message: "Everything else must be a JSON object." });
  if ("system" in found) throw new Problem(400, { message: "Everything else has a system; it has a field of its own." });
  return found;
}

function refusal(problem) {
  if (problem.status === 412) return note("bad", "Somebody has changed it since; close this and open it again.");
  const details = problem.details ?? [];
  if (!details.length) return note("bad", problem.advice ?? "It failed.");
  const reasons = details.map(({ field, message }) => (field ? `${field}: ${message}` : message));
  return note("bad", `${plural(details.length, "problem")}, so no version was made`, reasons);
}

/** A sentence about a version that was made. */
export function madeText({ id, version, created, persona }) {
  const tokens = persona?.prompt_tokens;
  const takes = tokens ? `, ${plural(tokens, "token")} of prompt with a short turn` : "";
  return `${id}@${version} ${created ? "is made" : "was there already"}, and current now${takes}.`;
}
