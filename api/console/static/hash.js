// SHA-256 of a file. The browser's own where it may be used (https and localhost) and the file is not huge; else ours,
// after FIPS 180-4, piece by piece, so that plain http on a lab's network and files of gigabytes work too.

const IN_ONE = 512 << 20;
const PIECE = 4 << 20;

/** Hex digits; `progress` is told the share that is done. Raises AbortError. */
export async function sha256(file, progress = () => {}, signal = null) {
  if (globalThis.crypto?.subtle && file.size <= IN_ONE) {
    const hash = await crypto.subtle.digest("SHA-256", await file.arrayBuffer());
    signal?.throwIfAborted();
    progress(1);
    return hex(new Uint8Array(hash));
  }
  const ours = new Sha256();
  for (let at = 0; at < file.size; at += PIECE) {
    signal?.throwIfAborted();
    ours.add(new Uint8Array(await file.slice(at, at + PIECE).arrayBuffer()));
    progress(Math.min(1, (at + PIECE) / file.size));
  }
  return hex(ours.end());
}

const hex = (bytes) => [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** The first 32 bits of the fractions of roots of the first primes. */
function fractions(number, root) {
  const found = [];
  for (let candidate = 2; found.length < number; candidate += 1) {
    let prime = true;
    for (let by = 2; by * by <= candidate; by += 1) if (candidate % by === 0) prime = false;
    if (prime) found.push(Math.floor((root(candidate) % 1) * 2 ** 32));
  }
  return found;
}

const ROUNDS = Int32Array.from(fractions(64, Math.cbrt));
const START = Int32Array.from(fractions(8, Math.sqrt));

export class Sha256 {
  #state = START.slice();
  #schedule = new Int32Array(64);
  #pending = new Uint8Array(64);
  #held = 0;
  #length = 0;

  add(bytes) {
    this.#length += bytes.length;
    let at = 0;
    if (this.#held) {
      at = Math.min(64 - this.#held, bytes.length);
      this.#pending.set(bytes.subarray(0, at), this.#held);
      this.#held += at;
      if (this.#held < 64) return;
      this.#block(this.#pending, 0);
      this.#held = 0;
    }
    for (; at + 64 <= bytes.length; at += 64) this.#block(bytes, at);
    this.#pending.set(bytes.subarray(at));
    this.#held = bytes.length - at;
  }

  end() {
    const bits = this.#length * 8;
    const padding = new Uint8Array((this.#held < 56 ? 64 : 128) - this.#held);
    padding[0] = 0x80;
    const view = new DataView(padding.buffer);
    view.setUint32(padding.length - 8, Math.floor(bits / 2 ** 32));
    view.setUint32(padding.length - 4, bits >>> 0);
    this.add(padding);
    const out = new DataView(new ArrayBuffer(32));
    this.#state.forEach((word, i) => out.setInt32(4 * i, word));
    return new Uint8Array(out.buffer);
  }

  #block(bytes, at) {
    const w = this.#schedule;
    for (let i = 0; i < 16; i += 1, at += 4)
      w[i] = (bytes[at] << 24) | (bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3];
    for (let i = 16; i < 64; i += 1) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = this.#state;
    for (let i = 0; i < 64; i += 1) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => (this.#state[i] = (this.#state[i] + word) | 0));
  }
}
