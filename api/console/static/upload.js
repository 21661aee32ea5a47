// Uploading: the files, hashed here, sent under their digests, registered; then the report, or every reason why not.

import { Problem, address, askJson, headers, problemOf } from "./api.js";
import { reportParts } from "./adapter_details.js";
import { byId, el, note, setText } from "./dom.js";
import { adapterFiles, dropped, idFrom } from "./files.js";
import { bytes, digest, plural } from "./format.js";
import { sha256 } from "./hash.js";

const MOST_CONFIG_BYTES = 1 << 20;

let chosen = null;
let abort = null;

export function startUpload() {
  const drop = byId("drop");
  for (const kind of ["folder", "files"]) {
    const input = byId(`${kind}-input`);
    byId(`choose-${kind}`).addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      choose([...input.files]);
      input.value = "";
    });
  }
  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  drop.addEventListener("dragleave", (event) => drop.contains(event.relatedTarget) || drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    choose(await dropped(event.dataTransfer));
  });
  // A file that misses the box would replace the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
  byId("upload-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("upload-cancel").addEventListener("click", () => abort?.abort());
}

function choose(files) {
  const found = adapterFiles(files);
  chosen = found.problem ? null : found;
  byId("upload-result").replaceChildren();
  setText(byId("chosen"), found.problem ?? `${found.weights.name}, ${bytes(found.weights.size)}, and its config.`);
  byId("drop").classList.toggle("wrong", Boolean(found.problem));
  if (chosen && !byId("upload-id").value) byId("upload-id").value = idFrom(found.folder ?? "");
}

async function send() {
  if (!chosen) {
    setText(byId("chosen"), "Choose the two files first.");
    byId("choose-folder").focus();
    return;
  }
  busy(true);
  try {
    const stored = byId("upload-stored").value;
    const wanted = { id: byId("upload-id").value, alias: byId("upload-alias").value.trim(), stored };
    const done = await upload(chosen, wanted);
    byId("upload-result").replaceChildren(...accepted(done));
    document.dispatchEvent(new Event("adapterschange"));
  } catch (problem) {
    byId("upload-result").replaceChildren(refused(problem));
  }
  busy(false);
}

function busy(is) {
  abort = is ? new AbortController() : null;
  byId("upload-send").disabled = is;
  byId("upload-cancel").disabled = !is;
  byId("upload-progress").hidden = !is;
  if (is) byId("upload-result").replaceChildren();
}

function step(text, share) {
  setText(byId("upload-step"), text);
  if (share === null) byId("upload-bar").removeAttribute("value");
  else byId("upload-bar").value = share;
}

async function upload({ config, weights, tokenizer }, { id, alias, stored }) {
  const { signal } = abort;
  step("Reading adapter_config.json", null);
  const parsed = await readConfig(config);
  step("Hashing the weights", 0);
  const hash = await sha256(weights, (share) => step("Hashing the weights", share), signal);
  step("Sending the weights", 0);
  await put(`/v1/blobs/sha256:${hash}`, weights, signal, (share) =>
    step(share < 1 ? "Sending the weights" : "The server stores them", share),
  );
  const words = tokenizer && (await addsTokens(tokenizer, signal)) ? await sendTokenizer(tokenizer, signal) : null;
  step("The server checks every tensor", null);
  const chosenOnly = { ...(alias ? { alias } : {}), ...(stored ? { stored } : {}), ...(words ? { tokenizer: words } : {}) };
  const body = { id, config: parsed, weights: `sha256:${hash}`, ...chosenOnly };
  return askJson("POST", "/v1/adapters", { body, signal });
}

/** Whether a tokenizer has tokens that the base lacks; trainers save one in any case. */
async function addsTokens(file, signal) {
  step("Reading tokenizer.json", null);
  let last = -1;
  try {
    last = Math.max(-1, ...JSON.parse(await file.text()).added_tokens.map(({ id }) => id));
  } catch {
    // No tokenizer of transformers: it names no tokens.
  }
  return last >= 0 && last >= (await numBaseTokens(signal));
}

/** 0 for a key that may only upload: the server finds out. */
async function numBaseTokens(signal) {
  try {
    return (await askJson("GET", "/tokenizer_info", { signal })).vocab_size;
  } catch (problem) {
    if (problem.status === 403) return 0;
    throw problem;
  }
}

async function sendTokenizer(file, signal) {
  const name = `sha256:${await sha256(file, () => {}, signal)}`;
  await put(`/v1/blobs/${name}`, file, signal, () => {});
  return name;
}

async function readConfig(file) {
  if (file.size > MOST_CONFIG_BYTES)
    throw new Problem(400, { message: `adapter_config.json has ${bytes(file.size)}; that is no config` });
  try {
    return JSON.parse(await file.text());
  } catch {
    throw new Problem(400, { message: "adapter_config.json is not JSON" });
  }
}

/** PUT with progress, which fetch cannot tell. */
function put(path, file, signal, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", address(path));
    for (const [name, value] of Object.entries(headers({ "content-type": "application/octet-stream" })))
      request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => progress(event.total ? event.loaded / event.total : 1));
    request.addEventListener("load", () => {
      if (request.status >= 200 && request.status < 300) resolve();
      else reject(problemOf(request.status, request.responseText, request.getResponseHeader("retry-after")));
    });
    request.addEventListener("error", () => reject(new Problem(0)));
    request.addEventListener("abort", () => reject(new DOMException("cancelled", "AbortError")));
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(file);
  });
}

function accepted(done) {
  const what = done.created
    ? `version ${done.version}`
    : `version ${done.version}, which had this very content already`;
  const alias = done.alias ? `, and ${done.id}:${done.alias} names it` : "";
  return [note("ok", `${done.id} is ${what} (${digest(done.digest)})${alias}.`), ...reportParts(done.report)];
}

function refused(problem) {
  if (problem.name === "AbortError") return el("p", { class: "quiet" }, "Cancelled. Nothing was registered.");
  if (!(problem instanceof Problem)) return note("bad", "the browser could not read the files");
  if (!problem.details.length) return note("bad", problem.advice);
  // The message would say the first of them once more.
  return note(
    "bad",
    `${plural(problem.details.length, "problem")}, so nothing was registered`,
    problem.details.map(reason),
  );
}

/** One reason of a refusal; messages that begin with `=` go on from the name of the field. */
function reason({ field, message, code }) {
  const named = field ? `${field}${message.startsWith("=") ? "" : ":"} ` : "";
  return `${named}${message} (${code})`;
}
