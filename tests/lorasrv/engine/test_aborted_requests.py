"""Requests whose clients leave, on the real engine: every account tells what the engine has made of them."""

import asyncio
import io
import json
import random
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from process_watch import Figures
from tiny_engine import GREEDY, PROMPT, client, idle, until

from adapter_store.store import AdapterStore
from api.observability import logs
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import RequestTimeout
from lorasrv.metrics.request_stats import FinishedRequestStats
from lorasrv.outputs import EngineOutput, FinishReason, RequestId
from lorasrv.request import RequestOptions

IDS = ("one", "two", "base")


class HeldDelivery:
    """Holds what the engine thread delivers until `release`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._is_held = engine, True
        self._news: deque[tuple[Any, Any]] = deque()

    def __call__(self, outputs: list[EngineOutput], results: Any) -> None:
        self._news.append((outputs, results))
        if not self._is_held:
            self.release()

    def release(self) -> None:
        self._is_held = False
        while self._news:
            self._engine._deliver(*self._news.popleft())


async def usage(http: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    row: dict[str, Any] = (await http.get(f"/v1/adapters/{name}/stats")).json()
    return row


@pytest.mark.parametrize(("max_tokens", "reason"), [(20, "length"), (400, "abort")])
async def test_what_is_on_its_way_when_a_client_leaves_counts(
    model: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch, max_tokens: int, reason: str
) -> None:
    out = io.StringIO()
    body = {"model": "one", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with client(model, store) as (engine, http):
        held, shown = HeldDelivery(engine), engine.metrics.stats
        monkeypatch.setattr(engine._thread, "_deliver", held)
        with logs.written("json", "info", out):
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(lambda: shown().generated_tokens_total >= 20)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            await until(lambda: shown().requests_finished_total == {reason: 1})
            assert '"request"' not in out.getvalue(), "told before its last tokens have come"
            held.release()
            await until(lambda: not engine._streams)
        figures, row = Figures((await http.get("/metrics")).text), await usage(http, "one")
    computed = figures.sum("generated_tokens_total")
    assert figures.sum("requests_finished_total", reason=reason) == row["requests"] == 1
    assert figures.sum("adapter_generated_tokens_total", adapter="one") == row["generated_tokens"] == computed >= 20
    assert engine.request_stats.aborted == ({"client": 1} if row["aborted"] else {})
    assert row["aborted"] == (reason == "abort")
    [line] = [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "request"]
    assert (line["completion_tokens"], line["finish_reason"], line["why"]) == (computed, reason, "client")
    assert line["request_id"]


async def test_an_answer_that_ends_with_its_stop_string_has_one_reason(model: Path, store: AdapterStore) -> None:
    """Its last token reaches `max_tokens`, so that the engine ends it for its length."""
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with client(model, store) as (engine, http):
        [plain] = (await http.post("/v1/completions", json=body)).json()["choices"]
        text = plain["text"]
        stop = next(text[at:] for at in range(len(text) - 1, -1, -1) if text.find(text[at:]) == at)
        [cut] = (await http.post("/v1/completions", json=body | {"stop": [stop]})).json()["choices"]
        assert (plain["finish_reason"], cut["finish_reason"], text) == ("length", "stop", cut["text"] + stop)
        assert engine.metrics.stats().requests_finished_total == {"length": 2}, "the stop string ends no earlier token"
        figures = Figures((await http.get("/metrics")).text)
        assert [figures.sum("requests_finished_total", reason=r) for r in ("stop", "length")] == [1, 1]


class LateDelivery:
    """Delivers what the engine thread posts in order, each time a moment later; keeps what it said of each request."""

    def __init__(self, engine: AsyncEngine, rng: random.Random) -> None:
        self.said: defaultdict[RequestId, list[EngineOutput]] = defaultdict(list)
        self._news: deque[tuple[Any, Any]] = deque()
        self._engine, self._rng = engine, rng

    def __call__(self, outputs: list[EngineOutput], results: Any) -> None:
        for output in outputs:
            self.said[output.request_id].append(output)
        self._news.append((outputs, results))
        later_s = self._rng.choice([0.0, 0.005, 0.02])
        asyncio.get_running_loop().call_later(later_s, lambda: self._engine._deliver(*self._news.popleft()))

    def by_reason(self) -> tuple[Counter[str], Counter[str]]:
        """Return the requests and their tokens by finish reason."""
        requests, tokens = Counter[str](), Counter[str]()
        for outputs in self.said.values():
            [reason] = [output.finish_reason for output in outputs if output.finish_reason is not None]
            requests[reason] += 1
            tokens[reason] += sum(len(output.new_token_ids) for output in outputs)
        return requests, tokens


@pytest.mark.parametrize("seed", range(3))
async def test_sums_by_finish_reason_are_the_engines(
    model: Path, store: AdapterStore, keys: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, ended = random.Random(seed), list[FinishedRequestStats]()

    async def ask(engine: AsyncEngine) -> None:
        await asyncio.sleep(rng.uniform(0, 0.5))
        name = rng.choice([None, "one", "two"])
        # Only of the base: reading an adapter's header may take as long, and then the engine hears of nothing.
        timeout_s = rng.choice([None, None, 0.001, 0.02]) if name is None else None
        options = RequestOptions(adapter_key=keys[name], adapter_id=name or "", timeout_s=timeout_s)
        sampling, prompt = replace(GREEDY, max_tokens=rng.randint(1, 30)), PROMPT[: rng.randint(5, 45)]
        streams = await engine.add_choices(prompt, sampling, rng.randint(1, 3), options)
        for stream in streams:
            with suppress(StopAsyncIteration, RequestTimeout):
                for _ in range(rng.randint(0, 35)):
                    await anext(stream)
            await stream.aclose()

    async with client(model, store, max_num_seqs=8) as (engine, http):
        late = LateDelivery(engine, rng)
        monkeypatch.setattr(engine._thread, "_deliver", late)
        engine.request_stats.listeners.append(ended.append)
        await asyncio.gather(*(ask(engine) for _ in range(80)))
        await idle(engine)
        await until(lambda: not engine._streams)
        await until(lambda: sum(engine.metrics.stats().requests_finished_total.values()) == len(ended))
        figures, rows = Figures((await http.get("/metrics")).text), [await usage(http, name) for name in IDS]
    requests, tokens = late.by_reason()
    assert requests.keys() == {"length", "abort", "timeout"}
    assert any(end.why == "client" and end.reason is FinishReason.LENGTH for end in ended), "none ended meanwhile"
    assert Counter(end.reason for end in ended) == requests
    for reason in requests:
        assert sum(end.generated_tokens for end in ended if end.reason is reason) == tokens[reason]
        assert figures.sum("requests_finished_total", reason=reason) == requests[reason]
    assert figures.sum("generated_tokens_total") == tokens.total() == sum(row["generated_tokens"] for row in rows)
    assert sum(row["aborted"] for row in rows) == requests["abort"] == figures.sum("aborted_total")
    assert sum(row["refused"] for row in rows) == requests["timeout"] == figures.sum("rejected_total")
