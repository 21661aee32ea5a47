// What was dropped or chosen -> the files of an adapter. A folder is read two levels deep, no further.

const CONFIG = "adapter_config.json";
const WEIGHTS = "adapter_model.safetensors";
const TOKENIZER = "tokenizer.json";
const DEPTH = 2;
const MOST = 500;

/** Files of a drop: those of dropped folders too. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files];
  const found = [];
  for (const entry of entries) await collect(entry, DEPTH, found);
  return found;
}

async function collect(entry, depth, found) {
  if (found.length >= MOST) return;
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    found.push(Object.assign(file, { path: entry.fullPath.slice(1) }));
  } else if (depth > 0) {
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) return;
      for (const inner of some) await collect(inner, depth - 1, found);
    }
  }
}

/** { config, weights, tokenizer, folder }, or { problem }: what is missing, or what there is too much of. Of a run with
 * checkpoints in folders of their own, the adapter beside them is taken. */
export function adapterFiles(files) {
  const least = Math.min(...files.filter(({ name }) => name === CONFIG || name === WEIGHTS).map(depthOf));
  const outer = files.filter((file) => depthOf(file) === least);
  const of = (name) => outer.filter((file) => file.name === name);
  const [configs, weights] = [of(CONFIG), of(WEIGHTS)];
  if (configs.length > 1 || weights.length > 1)
    return { problem: "That is more than one adapter; drop one folder at a time." };
  const missing = [configs.length ? null : CONFIG, weights.length ? null : WEIGHTS].filter(Boolean);
  if (!missing.length) {
    const [config] = configs;
    const tokenizer = of(TOKENIZER).find((file) => folderOf(file) === folderOf(config)) ?? null;
    return { config, weights: weights[0], tokenizer, folder: folderOf(config) };
  }
  const hint = files.some(({ name }) => name === "adapters.safetensors")
    ? " This looks like MLX: upload it with the lorasrv command, which converts it."
    : files.some(({ name }) => name === "adapter_model.bin")
      ? " A .bin file is a pickle, which is never read: save the adapter as safetensors."
      : "";
  return { problem: `${missing.join(" and ")} ${missing.length > 1 ? "are" : "is"} missing.${hint}` };
}

const partsOf = (file) => (file.path ?? file.webkitRelativePath ?? "").split("/");

const depthOf = (file) => partsOf(file).length;

const folderOf = (file) => partsOf(file).at(-2) ?? "";

/** An id that the server takes, made of a folder's name. */
export const idFrom = (name) =>
  name
    .toLowerCase()
    .replace(/[^a-z0-9._-]+/g, "-")
    .replace(/^[^a-z0-9]+/, "")
    .slice(0, 64);
