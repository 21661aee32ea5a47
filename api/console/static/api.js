// Asks the server. The key stays in this tab (sessionStorage) and goes out as a bearer token, to this server only.

const ROOT = new URL("..", import.meta.url);
const KEY = "lorasrv.key";

/** Fires `key` when the key has changed, and `refused` when the server wants another (401). */
export const session = new EventTarget();

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  session.dispatchEvent(new Event("key"));
}

/** What the server refused, in its own words. `status` is 0 where there was no answer. */
export class Problem extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(error.message || (status ? `the server answered ${status}` : "the server cannot be reached"));
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
    this.details = Array.isArray(error.details) ? error.details : [];
    this.retryAfter = retryAfter;
  }

  /** For people, with what to do. */
  get advice() {
    if (this.status === 401) return "The server wants a key. Enter one with the Key button.";
    if (this.status === 403) return `This key may not do that: ${this.message}`;
    const again = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : "";
    return (
      this.message.charAt(0).toUpperCase() + this.message.slice(1) + (/[.!?]$/.test(this.message) ? "" : ".") + again
    );
  }
}

export const address = (path) => new URL(path.replace(/^\//, ""), ROOT);

export function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

/** The answer of a route. Raises Problem for whatever is not 2xx; an abort stays an AbortError. */
export async function ask(method, path, { body, query = {}, signal, ifMatch } = {}) {
  const url = address(path);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const extra = body === undefined ? {} : { "content-type": "application/json" };
  if (ifMatch) extra["if-match"] = `"${ifMatch}"`;
  let answer;
  try {
    answer = await fetch(url, {
      method,
      signal,
      headers: headers(extra),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      ...sent,
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new Problem(0);
  }
  if (!answer.ok)
    throw problemOf(answer.status, await answer.text().catch(() => ""), answer.headers.get("retry-after"));
  return answer;
}

export const askJson = async (method, path, options) => (await ask(method, path, options)).json();

/** As JSON.parse, but integers that a number here cannot hold stay as they are written, for JSON.stringify. */
export const parseExactly = (text) =>
  JSON.parse(text, (_, value, context) =>
    Number.isInteger(value) && !Number.isSafeInteger(value) && JSON.rawJSON ? JSON.rawJSON(context.source) : value,
  );

/** The Problem that an answer of this status and body is. */
export function problemOf(status, text, retryAfter = null) {
  let error = {};
  try {
    const parsed = JSON.parse(text).error;
    error = typeof parsed === "string" ? { message: parsed } : (parsed ?? {});
  } catch {
    // Not ours: a proxy's page, perhaps. The status has to do.
  }
  if (status === 401) session.dispatchEvent(new Event("refused"));
  return new Problem(status, error, retryAfter);
}

/** An adapter's reference as part of a path; `:` and `@` are legal there and stay readable. */
export const inPath = (reference) => encodeURIComponent(reference).replaceAll("%3A", ":").replaceAll("%40", "@");
