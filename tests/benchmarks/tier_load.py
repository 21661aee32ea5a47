"""Requests to lorasrv, and what each answer told: tier, load time, first token, gaps between tokens. Needs httpx2.

    python tests/benchmarks/tier_load.py --url http://127.0.0.1:8000 --names 5000 --requests 160

Alone it sends one closed loop to a server that has adapters a0000, a0001, ... (`bench_tiers.py make`) and prints the
row of `bench_tiers.py throughput`. `lorasrv bench` loads any OpenAI-compatible server; this one also reads what only
lorasrv tells. Prompts begin with a random number, so that no prefix cache helps. A first token is the first event with
a choice, which the server sends as soon as it has it.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

TIERS = ("resident", "host", "disk")
WORDS = "the robot city river stone quiet bright engine letter garden winter signal copper forest market lantern"
PROMPT_WORDS = 48


@dataclass(frozen=True)
class Ask:
    """One streamed completion, greedy, of exactly `max_tokens` tokens. `every_token`: an event for each of them."""

    model: str
    prompt: str
    max_tokens: int
    on_cold: str | None = None
    every_token: bool = False

    def body(self) -> dict[str, Any]:
        options = {"include_usage": True, "continuous_usage_stats": self.every_token}
        cold = {} if self.on_cold is None else {"on_cold": self.on_cold}
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": options}
        return {"model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens, **fixed, **cold}


@dataclass
class Answer:
    """Times in ms; `arrivals_s` of every event with a choice, on the performance counter's clock."""

    model: str
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list)
    tokens: int = 0
    tier: str | None = None
    load_ms: float = 0.0
    queue_ms: float = 0.0
    preemptions: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.arrivals_s[0] - self.sent_s)

    def gaps_ms(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Between events that both came in that time."""
        times = [t for t in self.arrivals_s if begin_s <= t <= end_s]
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


class Client:
    """One server, asked by many at once."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(ask.model, time.perf_counter())
        try:
            async with self._http.stream("POST", self._url + "/v1/completions", json=ask.body()) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code} {(await response.aread())[:300]!r}"
                    return answer
                async for line in response.aiter_lines():
                    _take_line(answer, line)
        except httpx.HTTPError as error:
            answer.error = repr(error)
        if answer.error is None and answer.tokens != ask.max_tokens:
            answer.error = f"{answer.tokens} tokens instead of {ask.max_tokens}"
        return answer

    async def warm(self, name: str, deadline_ms: int) -> str | None:
        """What is wrong, if anything is."""
        response = await self._http.post(f"{self._url}/v1/adapters/{name}:warm", json={"deadline_ms": deadline_ms})
        return None if response.status_code == 200 else f"{response.status_code} {response.text[:300]}"

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, labels as they are written there, without `lorasrv_` and `_total`."""
        text = (await self._http.get(self._url + "/metrics")).text
        samples = re.findall(r"^lorasrv_(\w+?)(?:_total)?((?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        return {name + labels: float(value) for name, labels, value in samples}

    async def loop(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """So many clients, each of which sends its next request when the last one is answered."""
        answers: list[Answer] = []
        left = iter(asks)

        async def work() -> None:
            for ask in left:
                answers.append(await self.ask(ask))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return answers


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(timeout=900, trust_env=False, limits=limits) as http:
        yield Client(http, url)


def _take_line(answer: Answer, line: str) -> None:
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    event = json.loads(line[5:])
    if event.get("choices"):
        answer.arrivals_s.append(time.perf_counter())
    if event.get("error"):
        answer.error = str(event["error"])[:300]
    if usage := event.get("usage"):
        told = usage["lorasrv"]
        answer.tokens = usage["completion_tokens"]
        answer.tier, answer.load_ms, answer.queue_ms = told["adapter_tier"], told["load_ms"], told["queue_ms"]
        answer.preemptions = told["preemptions"]


def prompt(rng: random.Random, words: int = PROMPT_WORDS) -> str:
    """One that nobody has sent before."""
    nonce = random.SystemRandom().randrange(10**9)
    return f"{nonce:09d} " + " ".join(rng.choices(WORDS.split(), k=words))


def zipf_names(names: Sequence[str], count: int, s: float, rng: random.Random) -> list[str]:
    return rng.choices(names, weights=[1 / (k + 1) ** s for k in range(len(names))], k=count)


def zipf_asks(names: Sequence[str], count: int, max_tokens: int, seed: int, s: float = 1.1) -> list[Ask]:
    """Requests for adapters by Zipf's law, the first name the most popular."""
    rng = random.Random(seed)
    return [Ask(name, prompt(rng), max_tokens) for name in zipf_names(names, count, s, rng)]


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that is at least as large as `q` of all; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True)
class Traffic:
    """Figures of one closed loop."""

    tok_per_s: float
    seconds: float
    answers: list[Answer]
    counted: dict[str, float]
    """What the server's counters rose by."""

    @property
    def errors(self) -> list[str]:
        return [a.error for a in self.answers if a.error is not None]

    def cells(self) -> list[str]:
        good = [a for a in self.answers if a.error is None]
        ttft = [a.ttft_ms for a in good]
        shares = (sum(a.tier == tier for a in good) / max(1, len(good)) for tier in TIERS)
        loads = (self.counted.get(f'adapter_loads{{tier="{tier}"}}', 0.0) for tier in ("disk", "host"))
        counts = (*loads, self.counted.get('adapter_evictions{tier="pool"}', 0.0), self.counted.get("preemptions", 0.0))
        return [
            str(len({a.model for a in self.answers})),
            f"{self.tok_per_s:.1f}",
            f"{quantile(ttft, 0.5):.0f}",
            f"{quantile(ttft, 0.99):.0f}",
            " / ".join(f"{100 * share:.0f}" for share in shares),
            *(f"{count:.0f}" for count in counts),
            str(len(self.errors)),
        ]


TRAFFIC_TITLES = (
    "distinct",
    "tok/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "resident / host / disk %",
    "disk loads",
    "host loads",
    "evictions",
    "preemptions",
    "failed",
)


async def traffic(client: Client, asks: Sequence[Ask], concurrency: int) -> Traffic:
    """One closed loop, and what it did to the server's counters."""
    before = await client.metrics()
    begin = time.perf_counter()
    answers = await client.loop(asks, concurrency)
    seconds = time.perf_counter() - begin
    after = await client.metrics()
    tokens = sum(answer.tokens for answer in answers if answer.error is None)
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Traffic(tokens / seconds, seconds, answers, counted)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--names", type=int, default=16)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--zipf", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    models = [f"a{number:04d}" for number in range(a.names)]
    async with connect(a.url) as client:
        done = await traffic(client, zipf_asks(models, a.requests, a.max_tokens, a.seed, a.zipf), a.concurrency)
    print(f"| {' | '.join(TRAFFIC_TITLES)} |\n|{'---|' * len(TRAFFIC_TITLES)}\n| {' | '.join(done.cells())} |")
    if done.errors:
        print("first error:", done.errors[0])


if __name__ == "__main__":
    asyncio.run(main())
