"""Load one OpenAI-compatible server with requests spread over LoRA adapters and print one JSON line of figures.

    python load.py --url http://127.0.0.1:8000 --models a0000,a0001 --concurrency 16 --requests 32 --max-tokens 64

Every request streams /v1/completions with ignore_eos, so that all servers generate the same number of tokens; one that
returns another number counts as failed. Prompts begin with a nonce of the run, so that no prefix cache helps a repeat.
--law: distinct (round robin), uniform, zipf:S, identical (the first name only). Figures: output tokens per second over
the whole run, time to first token and latency between text chunks (median and p99, ms), failed requests. Needs httpx2.
"""

import argparse
import asyncio
import json
import random
import time

import httpx2 as httpx

WORDS = [
    "the",
    "robot",
    "city",
    "river",
    "stone",
    "quiet",
    "bright",
    "engine",
    "letter",
    "garden",
    "winter",
    "signal",
    "copper",
    "forest",
    "market",
    "lantern",
]


def pick(models, law, n, rng):
    if law == "distinct":
        return [models[i % len(models)] for i in range(n)]
    if law == "identical":
        return [models[0]] * n
    if law == "uniform":
        return rng.choices(models, k=n)
    s = float(([*law.split(":"), "1.0"])[1])
    return rng.choices(models, weights=[1 / (k + 1) ** s for k in range(len(models))], k=n)


async def one(client, a, model, prompt, out):
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": a.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {a.key}"} if a.key else {}
    start = last = time.perf_counter()
    first, gaps, tokens = None, [], 0
    try:
        async with client.stream("POST", a.url + "/v1/completions", json=body, headers=headers) as r:
            if r.status_code != 200:
                out.append({"error": f"{r.status_code} {(await r.aread())[:200]!r}"})
                return
            async for line in r.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[5:])
                if event.get("error"):
                    out.append({"error": str(event["error"])[:200]})
                    return
                if event.get("usage"):
                    tokens = event["usage"].get("completion_tokens", 0)
                if event.get("choices") and event["choices"][0].get("text"):
                    now = time.perf_counter()
                    if first is None:
                        first = now - start
                    else:
                        gaps.append(now - last)
                    last = now
        if tokens != a.max_tokens or first is None:
            out.append({"error": f"{tokens} tokens instead of {a.max_tokens}"})
        else:
            out.append({"ttft": first, "gaps": gaps, "tokens": tokens})
    except (httpx.HTTPError, ValueError) as e:
        out.append({"error": repr(e)})


def quantile(xs, q):
    xs = sorted(xs)
    return round(1000 * xs[min(len(xs) - 1, int(q * len(xs)))], 1) if xs else None


async def run(a):
    rng = random.Random(a.seed)
    models = a.models.split(",")
    names = pick(models, a.law, a.requests, rng)
    nonce = f"{time.time_ns() % 10**9:09d}"
    prompts = [f"{nonce} request {i}. " + " ".join(rng.choices(WORDS, k=a.prompt_words)) for i in range(a.requests)]
    out, queue = [], list(zip(names, prompts, strict=False))[::-1]
    async with httpx.AsyncClient(
        timeout=900, trust_env=False, limits=httpx.Limits(max_connections=a.concurrency + 4)
    ) as client:

        async def worker():
            while queue:
                await one(client, a, *queue.pop(), out)

        for _ in range(a.warmup):
            await one(client, a, models[0], "warm up", [])
        start = time.perf_counter()
        await asyncio.gather(*[worker() for _ in range(a.concurrency)])
        wall = time.perf_counter() - start
    good = [o for o in out if "error" not in o]
    bad = [o["error"] for o in out if "error" in o]
    gaps = [g for o in good for g in o["gaps"]]
    print(
        json.dumps(
            {
                "label": a.label,
                "adapters": len(set(names)),
                "law": a.law,
                "concurrency": a.concurrency,
                "requests": a.requests,
                "tok_per_s": round(sum(o["tokens"] for o in good) / wall, 1),
                "wall_s": round(wall, 2),
                "ttft_p50_ms": quantile([o["ttft"] for o in good], 0.5),
                "ttft_p99_ms": quantile([o["ttft"] for o in good], 0.99),
                "itl_p50_ms": quantile(gaps, 0.5),
                "itl_p99_ms": quantile(gaps, 0.99),
                "failed": len(bad),
                "first_error": bad[:1],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--models", required=True, help="comma-separated model names: adapters, or the base")
    p.add_argument("--law", default="distinct")
    p.add_argument("--concurrency", type=int, default=16)
    p.add_argument("--requests", type=int, default=32)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--prompt-words", type=int, default=48)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--key", default=None)
    p.add_argument("--label", default="")
    asyncio.run(run(p.parse_args()))
