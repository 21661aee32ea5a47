"""Adapters that are replaced, deleted, evicted and reloaded under load, and a flood of requests.

The model and its adapters are markers: each token says which adapter made it, and all of them are compared. What a
flood costs the admitted requests is measured by `tests/benchmarks/bench_overload.py`, and `tests/benchmarks/soak.py` is
everything at once for a quarter of an hour (docs/reliability.md); `-m long` runs both here for less than a minute.
"""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from flood import Outcome, call, open_loop
from marker_served import (
    PAGE_BYTES,
    SERVE_FLAGS,
    host_cache_bytes,
    pool_bytes,
    prompt_of,
    said_in,
    some_prompt,
    some_text,
    upload,
    write_served_model,
)
from marker_traffic import GONE, Ask, Traffic, Wrong
from markers import zipf_odds
from process_watch import Figures, held_by
from served import ROOT, Served, serve

pytestmark = pytest.mark.anyio
SLOTS, MOST_QUEUED = 8, 140
STREAMED, LONGEST = 440, 496
"""Tokens of the streams that last while everything else happens, and of them with their prompts."""
ADAPTER_PAGES, RESIDENTS, HOSTED = 12, 8, 16
"""The pool has a dozen pages for adapters of one to three: some eight; the rest is for keys and values."""
CLIENTS = 24
DEADLINE_S = 60.0
FLOOD, FLOOD_TOKENS = 400, 4
GROWTH_BYTES = 64 << 20
PIECE = "abcd"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_served_model(tmp_path_factory.mktemp("marked") / "model")
    pool = pool_bytes(4, SLOTS, LONGEST)
    memory = ("--pool-bytes", pool, "--adapter-pool-fraction", (ADAPTER_PAGES + 0.5) * PAGE_BYTES / pool)
    memory = (*memory, "--host-cache-bytes", host_cache_bytes(HOSTED))
    bounds = ("--max-num-seqs", SLOTS, "--max-queued", MOST_QUEUED, "--kernels", "torch")
    # Streams last while everything else happens, also beside a client that stands still for a while.
    slow = ("--testing", "--inject-faults", "step-hangs:20ms@1x1000000")
    with serve("--model", model, *SERVE_FLAGS, *memory, *bounds, *slow) as served:
        yield served


@asynccontextmanager
async def client(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    # None is kept for the next request: the server may be closing it just then.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=served.url, trust_env=False, timeout=120, limits=limits) as http:
        yield http


def figures(served: Served) -> Figures:
    return Figures(served.http.get("/metrics").text)


async def until(served: Served, what: Callable[[Figures], bool]) -> None:
    for _ in range(600):
        if what(await asyncio.to_thread(figures, served)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it never came to that: {served.held()}")


async def put(traffic: Traffic, name: str, number: int, variety: int = 0) -> None:
    """Upload; from then on the name means that marker."""
    traffic.name(name).begin(number)
    _, digest = await upload(traffic.http, name, number, variety)
    traffic.digests[digest] = number
    traffic.name(name).settle(number)


async def replaced_and_deleted(served: Served) -> Traffic:
    async with client(served) as http:
        traffic = Traffic(http)
        mia = traffic.name("mia")
        await put(traffic, "mia", 5)
        rng = random.Random(22)
        prompt = lambda: some_prompt(rng, longest=LONGEST - STREAMED)  # noqa: E731
        ask = lambda **fields: asyncio.create_task(traffic.ask(Ask("mia", prompt(), **fields)))  # noqa: E731
        asked = [ask(stream=True, max_tokens=STREAMED) for _ in range(SLOTS)]
        await until(served, lambda shown: shown.sum("requests_running") == SLOTS)
        asked += [ask(stream=number % 2 == 0, max_tokens=1 + number % 5) for number in range(100)]
        await until(served, lambda shown: shown.sum("requests_waiting") >= 100)
        # All of them are accepted, and a name is resolved when a request is.
        mia.decide()
        await put(traffic, "mia", 700, 3)
        asked += [ask(stream=True, max_tokens=3) for _ in range(10)]
        await until(served, lambda shown: shown.sum("requests_waiting") >= 110)
        mia.decide()
        mia.begin(GONE)
        assert (await http.delete("/v1/adapters/mia")).status_code == 202
        mia.settle(GONE)
        for one in await asyncio.gather(*(ask(max_tokens=3) for _ in range(10))):
            assert (one.status, one.error) == (404, "model_not_found")
        await put(traffic, "mia", 41, 1)
        asked += [ask(max_tokens=3) for _ in range(10)]
        assert figures(served).sum("requests_running") == SLOTS, "the streams ended too early to prove anything"
        await asyncio.gather(*asked)
        gone = await http.delete("/v1/adapters/mia?wait=10")
        assert (gone.status_code, gone.json()["requests_running"]) == (200, 0)
    return traffic


@pytest.mark.long
def test_an_adapter_is_replaced_and_deleted_under_streams_and_a_queue(served: Served) -> None:
    """Requests end on what they were accepted for, whatever happens to the name."""
    traffic = asyncio.run(replaced_and_deleted(served))
    assert (traffic.tally["answered"], traffic.tally["404"]) == (SLOTS + 100 + 10 + 10, 10)


async def evict_and_reload(served: Served, adapters: int, requests: int) -> Traffic:
    async with client(served) as http:
        traffic, rng = Traffic(http), random.Random(23)
        names = [f"s{number:04}" for number in range(adapters)]
        for number, name in enumerate(names):
            await put(traffic, name, number, number % 10)
        odds, prefixes = zipf_odds(adapters), [some_text(rng, 32) for _ in range(4)]

        async def clients(first: int) -> None:
            for _ in range(first, requests, CLIENTS):
                name = rng.choices(names, cum_weights=odds)[0]
                prompt, stream = some_prompt(rng, prefixes), rng.random() < 0.5
                # A request that starves ends with 504, and that is wrong.
                await traffic.ask(Ask(name, prompt, 4, stream=stream, fields=(("timeout_s", DEADLINE_S),)))

        await asyncio.gather(*(clients(first) for first in range(CLIENTS)))
        for name in names:
            assert (await http.delete(f"/v1/adapters/{name}")).status_code == 202
    return traffic


@pytest.mark.parametrize(
    ("adapters", "requests"),
    [(24, 96), pytest.param(120, 300, marks=pytest.mark.long), pytest.param(1000, 1500, marks=pytest.mark.exhaustive)],
)
def test_evict_and_reload_storm(served: Served, adapters: int, requests: int) -> None:
    before = figures(served)
    traffic = asyncio.run(evict_and_reload(served, adapters, requests))
    assert (traffic.tally["answered"], traffic.tally["tokens"]) == (requests, 4 * requests)
    after = figures(served)
    for name, labels in (("evictions", {}), ("loads", {"tier": "disk"}), ("loads", {"tier": "host"})):
        came = after.sum(f"adapter_{name}_total", **labels) - before.sum(f"adapter_{name}_total", **labels)
        assert came > RESIDENTS, f"{name} {labels}: {came}, too calm to prove anything"


@pytest.mark.long
def test_a_flood(served: Served) -> None:
    """Refused requests know when to retry, the others get all they asked for."""
    body = {"model": "marked", "prompt": PIECE, "max_tokens": FLOOD_TOKENS, "ignore_eos": True, "temperature": 0}

    async def flood() -> list[Outcome]:
        """While every slot is taken for a while, so that the queue fills up however fast the machine is."""
        async with client(served) as http:
            running = [asyncio.create_task(call(http, {**body, "max_tokens": STREAMED})) for _ in range(SLOTS)]
            await until(served, lambda shown: shown.sum("requests_running") == SLOTS)
            flooding = await open_loop(http, lambda _: body, 5000.0, 60.0, FLOOD)
            assert all(one.is_answered and len(said_in(one.text)) == STREAMED for one in await asyncio.gather(*running))
            return flooding

    first = served.post("/v1/completions", **body)
    served.calm_down()
    before = held_by(served.pid)
    outcomes = asyncio.run(flood())
    answered = [one for one in outcomes if one.is_answered]
    refused = [one for one in outcomes if one.status == 429]
    assert [one for one in outcomes if not one.is_answered and one.status != 429] == []
    assert len(answered) >= MOST_QUEUED - SLOTS
    assert refused, "that was no flood"
    assert all(1 <= int(one.retry_after or 0) <= 60 for one in refused)
    assert {one.error for one in refused} == {"server_overloaded"}
    assert {one.text for one in answered} == {first.json()["choices"][0]["text"]}
    served.calm_down()
    assert served.post("/v1/completions", **body).json()["choices"] == first.json()["choices"]
    assert held_by(served.pid).rss_bytes - before.rss_bytes < GROWTH_BYTES
    served.until(lambda: held_by(served.pid).fds <= before.fds)


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "bench_overload.py --model marked --calm-seconds 3 --seconds 8",
        pytest.param("soak.py --minutes 0.5 --folder {folder}", marks=pytest.mark.exhaustive),
    ],
)
def test_ten_times_the_capacity_and_everything_at_once(command: str, tmp_path: Path) -> None:
    script, *arguments = command.format(folder=tmp_path / "soak").split()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "benchmarks" / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def answering(text: str, status: int = 200, **headers: str) -> Callable[[httpx2.Request], httpx2.Response]:
    body = {"choices": [{"index": 0, "text": text}]} if status == 200 else {"error": {"code": "x"}}
    return lambda _: httpx2.Response(status, json=body, headers=headers)


def token(marker: int, topic: int = 0) -> str:
    """A token of a marker, as the marked model answers PIECE; another topic is that of another prompt."""
    return f" t{(prompt_of(PIECE).ids[0] + topic) % 7}.0.{marker}"


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (answering(token(5) * 2), None),
        (answering(token(6) * 2), "expected one of"),
        (answering(token(5) + token(7)), "expected one of"),
        (answering(token(5, topic=4) * 2), "topic"),
        (answering(token(5)), "2 tokens were asked for"),
        (answering(token(5) * 2, **{"x-adapter-digest": "other"}), "digest"),
        (answering("yes"), "no adapter says"),
        (answering("", 503), "503"),
        (answering("", 404), "404"),
        (answering("", 429), "without Retry-After"),
    ],
)
async def test_a_wrong_answer_is_noticed(handler, says: str | None) -> None:
    transport = httpx2.MockTransport(handler)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        traffic = Traffic(http)
        traffic.digests["other"] = 6
        traffic.name("mia").settle(5)
        expected = pytest.raises((Wrong, AssertionError), match=says) if says else contextlib.nullcontext()
        with expected:
            await traffic.ask(Ask("mia", prompt_of(PIECE), max_tokens=2))
