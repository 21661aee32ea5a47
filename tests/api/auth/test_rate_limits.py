"""How much a key may use: requests and tokens in a minute, answers at a time."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from callers import with_callers
from clock import Clock
from fake_engine import HANG, say
from fastapi.routing import APIRoute

from api.app import _ROUTES
from api.auth.principal import ANYBODY, Caller, KeyLimits, Scope
from api.auth.rate_limits import HEADERS, MAX_ACCOUNTS, KeyAccount, RateLimiter, duration
from api.auth.scopes import GENERATING, REPLICATE, needed
from api.batches.in_process import in_process_client
from api.batches.input_lines import pending_lines, scan
from api.batches.runner import LineRunner
from api.serving.admission import AdmissionController
from lorasrv.errors import (
    AdapterCold,
    AdapterLoadFailed,
    EngineOverloaded,
    InvalidRequest,
    LimitExceeded,
    RequestTimeout,
)
from lorasrv.outputs import CLIENT

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny-base"}
PLAIN = {"model": "tiny-base", "prompt": "hi"}
Admit = Callable[..., Awaitable[list[Any]]]


def key(name: str = "ann", **limits: int) -> Caller:
    return Caller(name, frozenset({Scope.INFER}), ("*",), KeyLimits(**limits))


class Stream:
    """Generates so many tokens, one at a time, or fails at once; `ahead` more are generated than are read."""

    def __init__(self, tokens: int = 3, error: Exception | None = None, prompt: int = 5, ahead: int = 0) -> None:
        self.request_id, self.num_prompt_tokens = "r", prompt
        self._tokens, self._error, self._ahead = tokens, error, ahead
        self._read = 0
        self.closed = False

    async def __anext__(self) -> Any:
        if self._error is not None:
            raise self._error
        self._read += 1
        return SimpleNamespace(num_generated_tokens=self._read, finished=self._read == self._tokens)

    @property
    def num_generated_tokens(self) -> int:
        return self._read + self._ahead

    async def aclose(self, why: str = CLIENT) -> None:
        self.closed = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> RateLimiter:
    return RateLimiter(clock)


@pytest.fixture
def admit(limiter: RateLimiter) -> Admit:
    """admit(caller, ...): streams of an engine whose queue is never full; `add` opens those of a prompt."""
    engine: Any = SimpleNamespace(check_admission=lambda _: None)

    async def run(caller: Caller, prompts: int = 1, width: int = 1, add: Any = None, **how: Any) -> list[Any]:
        async def streams(_: object) -> Sequence[Any]:
            return [Stream(**how) for _ in range(width)]

        async def begin() -> Any:
            return add or streams

        return await AdmissionController(engine, limiter).admit(caller, [[n] for n in range(prompts)], width, begin)

    return run


async def read(streams: Sequence[Any], most: int = 10**9) -> None:
    for stream in streams:
        for _ in range(most):
            if (await anext(stream)).finished:
                break


class TestLimits:
    async def test_a_minutes_worth_at_once_then_steadily(self, admit, clock) -> None:
        caller = key(requests_per_min=4)
        for _ in range(4):
            await admit(caller)
        with pytest.raises(LimitExceeded, match=r"4 requests per minute \(requests_per_min\)") as caught:
            await admit(caller)
        assert caught.value.retry_after_s == pytest.approx(15)
        clock.now += 14.9
        with pytest.raises(LimitExceeded):
            await admit(caller)
        clock.now += 0.1
        await admit(caller)
        clock.now += 3600
        for _ in range(4):
            await admit(caller)
        with pytest.raises(LimitExceeded):
            await admit(caller)

    @pytest.mark.parametrize("rate", [1, 7, 59, 60, 61, 997])
    async def test_retry_after_is_enough_whatever_the_rate(self, admit, clock, rate: int) -> None:
        caller = key(requests_per_min=rate)
        for _ in range(rate):
            await admit(caller)
        for _ in range(20):
            with pytest.raises(LimitExceeded) as caught:
                await admit(caller)
            clock.now += caught.value.retry_after_s
            await admit(caller)

    async def test_each_prompt_is_a_request(self, admit, limiter) -> None:
        caller = key(requests_per_min=5)
        await admit(caller, prompts=3, width=4)
        assert limiter.headers(caller)["x-ratelimit-remaining-requests"] == "2"
        with pytest.raises(LimitExceeded):
            await admit(caller, prompts=3)
        with pytest.raises(InvalidRequest, match=r"6 prompts.* 5 \(requests_per_min\)") as caught:
            await admit(caller, prompts=6)
        assert caught.value.param == "prompt"

    async def test_keys_do_not_share(self, admit) -> None:
        for caller in (key("ann", requests_per_min=1), key("bob", requests_per_min=1), *[ANYBODY] * 9):
            await admit(caller)
        with pytest.raises(LimitExceeded):
            await admit(key("ann", requests_per_min=1))

    async def test_a_limit_that_changes(self, admit) -> None:
        for _ in range(8):
            await admit(key(requests_per_min=10))
        await admit(key(requests_per_min=1))
        with pytest.raises(LimitExceeded):
            await admit(key(requests_per_min=1))
        await admit(key())

    async def test_tokens_of_a_prompt_count_at_once_and_of_an_answer_at_its_end(self, admit, limiter, clock) -> None:
        caller = key(tokens_per_min=60)
        left = lambda: limiter.headers(caller)["x-ratelimit-remaining-tokens"]  # noqa: E731
        streams = await admit(caller, prompts=2, width=2, tokens=5, prompt=10)
        assert left() == "40", "choices share a prompt"
        await read(streams, most=4)
        assert left() == "40"
        await read(streams)
        assert left() == "20"
        (stream,) = await admit(caller, tokens=1000, prompt=15)
        await read([stream], most=65)
        await stream.aclose()
        # 60 below nothing: what was generated for a client that disconnected counts.
        with pytest.raises(LimitExceeded, match=r"60 tokens per minute \(tokens_per_min\)") as caught:
            await admit(caller)
        assert caught.value.retry_after_s == pytest.approx(61)
        assert left() == "0"
        clock.now += 61
        await admit(caller)

    async def test_choices_and_prompts_are_concurrent_answers(self, admit) -> None:
        caller = key(max_concurrent=6)
        streams = await admit(caller, prompts=2, width=2)
        await admit(caller, width=2)
        with pytest.raises(LimitExceeded, match=r"6 concurrent answers \(max_concurrent\)") as caught:
            await admit(caller)
        assert caught.value.retry_after_s >= 1
        await read(streams[:1])
        await admit(caller)
        with pytest.raises(InvalidRequest, match="7 concurrent answers") as never:
            await admit(caller, width=7)
        assert never.value.param == "n"

    async def test_concurrent_answers_are_released_once(self, admit, limiter) -> None:
        caller = key(max_concurrent=2)
        for how in range(6):
            streams = await admit(caller, width=2)
            with pytest.raises(LimitExceeded):
                await admit(caller)
            await read(streams, most=1 if how % 2 else 9)
            for stream in (*streams, *streams):
                await stream.aclose()
        assert limiter._accounts["ann"].begun_s == []

    async def test_about_when_an_answer_will_end(self, admit, clock) -> None:
        caller = key(max_concurrent=1)
        for _ in range(40):
            streams = await admit(caller)
            clock.now += 20
            await read(streams)
        await admit(caller)
        clock.now += 5
        with pytest.raises(LimitExceeded) as caught:
            await admit(caller)
        assert caught.value.retry_after_s == pytest.approx(15, abs=0.1)

    async def test_accounts_are_bounded(self, admit, limiter) -> None:
        held = await admit(key("busy", max_concurrent=1))
        for number in range(2 * MAX_ACCOUNTS):
            limiter.check(key(f"k{number}", requests_per_min=1))
        assert len(limiter._accounts) <= MAX_ACCOUNTS
        assert "busy" in limiter._accounts
        await read(held)

    async def test_busy_accounts_are_not_looked_at_for_each_new_one(
        self, limiter: RateLimiter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks, number = list[KeyAccount](), MAX_ACCOUNTS + 100
        monkeypatch.setattr(KeyAccount, "is_idle", lambda account: looks.append(account))
        for name in map(str, range(number)):
            limiter.check(key(name, requests_per_min=1))
        assert (len(limiter._accounts), len(looks) <= 2 * number) == (number, True)


class TestCosts:
    """What a request that is refused, fails or is left has used: (requests left, tokens left)."""

    caller = key(requests_per_min=5, tokens_per_min=100, max_concurrent=4)

    @pytest.fixture
    def left(self, limiter) -> Callable[[], tuple[int, int]]:
        def read_headers() -> tuple[int, int]:
            told = limiter.headers(self.caller)
            assert not limiter._accounts["ann"].begun_s, "no answer is counted as running"
            requests, tokens = (told[f"x-ratelimit-remaining-{what}"] for what in ("requests", "tokens"))
            return int(requests), int(tokens)

        return read_headers

    async def test_nothing_if_a_limit_refuses(self, admit, left) -> None:
        for how in ({"prompts": 6}, {"width": 5}):
            with pytest.raises(InvalidRequest):
                await admit(self.caller, **how)
            assert left() == (5, 100)

    async def test_nothing_if_the_engine_refuses_a_prompt(self, admit, left) -> None:
        opened: list[Stream] = []

        async def add(number: list[int]) -> Sequence[Any]:
            if number == [2]:
                raise EngineOverloaded("full", retry_after_s=1.0)
            opened.append(Stream())
            return opened[-1:]

        with pytest.raises(EngineOverloaded):
            await admit(self.caller, prompts=3, add=add)
        assert [stream.closed for stream in opened] == [True, True]
        assert left() == (5, 100)

    async def test_nothing_if_the_engine_fails(self, admit, left) -> None:
        streams = await admit(self.caller, width=2, error=AdapterLoadFailed("damaged"))
        with pytest.raises(AdapterLoadFailed):
            await anext(streams[0])
        for stream in streams:
            await stream.aclose()
        assert left() == (5, 100)

    async def test_a_request_if_its_adapter_is_cold(self, admit, left) -> None:
        """Otherwise a key could have the pool filled with its adapters for nothing, without end."""
        for requests in range(4, -1, -1):
            for stream in await admit(self.caller, width=2, error=AdapterCold("cold", retry_after_s=1.0)):
                with pytest.raises(AdapterCold):
                    await anext(stream)
            assert left() == (requests, 100)
        with pytest.raises(LimitExceeded):
            await admit(self.caller)
        assert left() == (0, 100)

    async def test_what_was_computed_if_a_client_disconnects(self, admit, left) -> None:
        streams = await admit(self.caller, width=2)
        await read(streams[:1], most=1)
        for stream in streams:
            await stream.aclose()
        assert left() == (4, 94)

    async def test_what_was_computed_and_never_read(self, admit, left) -> None:
        [stream] = await admit(self.caller, tokens=90, ahead=60)
        await read([stream], most=1)
        await stream.aclose()
        assert left() == (4, 100 - 5 - 61)

    async def test_the_prompt_of_a_request_that_timed_out(self, admit, left) -> None:
        """Otherwise a short timeout_s has prompts computed for nothing."""
        [stream] = await admit(self.caller, prompt=70, error=RequestTimeout("too late"))
        with pytest.raises(RequestTimeout):
            await anext(stream)
        assert left() == (4, 30)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (86.4, "1m26.4s"), (360, "6m0s")],
)
def test_times_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class TestServed:
    """By every route that generates."""

    @pytest.fixture
    def callers(self) -> dict[str, Caller]:
        return {"ann": key("ann", requests_per_min=3, tokens_per_min=6000, max_concurrent=2), "bob": key("bob")}

    @pytest.fixture
    def server(self, make_server, dispatcher, callers) -> Iterator[Any]:
        server = make_server()
        self.services = dispatcher[0].app.state.services
        self.accounts = self.services.admission.rate_limiter._accounts
        with_callers(dispatcher[0].app, callers)
        yield server
        assert not any(account.begun_s for account in self.accounts.values())

    def ask(self, server: Any, path: str, body: Any, caller: str = "ann") -> httpx2.Response:
        response: httpx2.Response = server.http.post(path, json=body, headers={"x-caller": caller})
        return response

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "stream": True}),
            ("/v1/completions", PLAIN),
            ("/v1/responses", {"model": CHAT["model"], "input": "hi"}),
            ("/generate", {"inputs": "hi"}),
            ("/generate_stream", {"inputs": "hi"}),
            ("/", {"inputs": "hi", "stream": True}),
        ],
    )
    def test_requests(self, server, engine, path: str, body: dict[str, Any]) -> None:
        encode = lambda text, **_: list(text.encode())  # noqa: E731
        engine.tokenizer = SimpleNamespace(encode=encode, special_ids=frozenset(), token=str)
        for left in ("2", "1", "0"):
            response = self.ask(server, path, body)
            assert (response.status_code, response.headers["x-ratelimit-remaining-requests"]) == (200, left)
        refused = self.ask(server, path, body)
        assert refused.status_code == 429
        assert "3 requests per minute (requests_per_min)" in refused.text
        if path.startswith("/v1"):
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("limit_exceeded", "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(engine.added) == 3
        other = self.ask(server, path, body, "bob")
        assert other.status_code == 200
        assert not set(HEADERS) & other.headers.keys()

    def test_warming_is_a_request(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        warm = "/v1/adapters/mia:warm"
        assert [self.ask(server, warm, {}).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [asked[0] for asked in engine.asked].count("warm") == 3
        assert self.ask(server, warm, {}, "bob").status_code == 200

    def test_every_route_that_changes_or_computes_something_is_a_request(self, server, callers) -> None:
        callers["ann"] = key("ann", requests_per_min=2)
        assert self.ask(server, "/tokenize", {"prompt": 3}).headers["x-ratelimit-remaining-requests"] == "1"
        assert server.http.delete("/v1/adapters/mia", headers={"x-caller": "ann"}).status_code == 404
        routes = [r for module in _ROUTES for r in module.router.routes if isinstance(r, APIRoute)]
        asked = {(method, re.sub(r"{[^}]*}", "x", route.path)) for route in routes for method in route.methods}
        asked -= {("POST", path) for path in GENERATING}
        # No client may ask them.
        asked = {each for each in asked if needed(*each) != REPLICATE}
        assert len(asked) > 35
        answers = {each: server.http.request(*each, headers={"x-caller": "ann"}).status_code for each in asked}
        free = ("POST", "/v1/batches/x/cancel")
        assert {each for each, status in answers.items() if status == 429} == {
            each for each in asked if each[0] not in ("GET", "HEAD") and each != free
        }
        assert answers[free] == 404

    def test_a_debt_of_tokens_refuses_answers_only(self, server, callers) -> None:
        callers["ann"] = key("ann", requests_per_min=5, tokens_per_min=10)
        assert self.ask(server, "/v1/completions", {**PLAIN, "prompt": "x" * 100}).status_code == 200
        assert self.ask(server, "/v1/completions", PLAIN).status_code == 429
        assert server.http.delete("/v1/adapters/mia", headers={"x-caller": "ann"}).status_code == 404

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
    def test_grammars_count_while_they_are_compiled(self, server, engine, monkeypatch, path: str) -> None:
        """A key with two answers at a time has no third grammar compiled meanwhile; refused ones cost nothing."""
        seen: list[int] = []

        async def compile_(*_: object) -> None:
            seen.append(len(self.accounts["ann"].begun_s))
            raise InvalidRequest("too large", param="guided_regex")

        monkeypatch.setattr(engine.grammars, "compile", compile_)
        engine.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()))
        grammar = {"grammar": {"type": "regex", "value": "a+"}}
        body = {**CHAT, "guided_regex": "a+"} if path != "/generate" else {"inputs": "hi", "parameters": grammar}
        for _ in range(5):
            assert self.ask(server, path, body).status_code in (400, 422)
        assert seen == [1] * 5

    def test_tokens(self, server, engine, callers) -> None:
        callers["ann"] = key("ann", tokens_per_min=60)
        response = self.ask(server, "/v1/completions", {**PLAIN, "prompt": "x" * 400})
        used = response.json()["usage"]["total_tokens"]
        refused = self.ask(server, "/v1/completions", PLAIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_exceeded")
        assert engine.request_stats.rejected["limit_exceeded"] >= 1, "counted, though the engine was not asked"
        assert used - 60 <= int(refused.headers["retry-after"]) <= used - 59 + 1
        assert refused.headers["x-ratelimit-limit-tokens"] == "60"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"

    def test_other_refusals_cost_nothing(self, server, engine) -> None:
        for fields in ({"model": "nobody"}, {"prompt": [400]}):
            assert self.ask(server, "/v1/completions", PLAIN | fields).status_code in (400, 404)
        engine.add_error = EngineOverloaded("full", retry_after_s=1.0)
        refused = self.ask(server, "/v1/chat/completions", CHAT)
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "3")

    @pytest.mark.parametrize(
        ("fields", "width"),
        [({"stream": True}, 1), ({}, 1), ({"n": 2}, 2), ({"prompt": ["a", "b"], "stream": True}, 2)],
    )
    def test_a_disconnect_releases_the_answers(self, server, engine, eventually, fields, width: int) -> None:
        engine.breaks(2, HANG)
        leaving = server.leaving("/v1/completions", "x-caller: ann", **PLAIN | fields)
        eventually(lambda: self.accounts.get("ann") and self.accounts["ann"].begun_s)
        assert len(self.accounts["ann"].begun_s) == width
        if width == 2:
            refused = self.ask(server, "/v1/completions", PLAIN | fields)
            assert refused.status_code == 429
            assert "2 concurrent answers (max_concurrent)" in refused.json()["error"]["message"]
        leaving.socket.close()
        eventually(lambda: not self.accounts["ann"].begun_s)
        engine.script = say()
        assert self.ask(server, "/v1/completions", PLAIN).status_code == 200

    def test_a_batch_waits_as_long_as_it_was_told(self, server, engine, callers, tmp_path) -> None:
        clock = Clock()
        services = replace(self.services, admission=AdmissionController(engine, RateLimiter(clock)))
        caller = replace(callers["ann"], limits=KeyLimits(requests_per_min=2))
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.now += 2 * seconds

        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": PLAIN} for n in range(5)]
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(map(json.dumps, lines)))
        results: list[Any] = []
        sink: Any = SimpleNamespace(add=results.append, flush=lambda: None)

        async def scenario() -> None:
            client = in_process_client(services, caller)
            runner = LineRunner(client, sink, slots=asyncio.Semaphore(1), concurrency=1, sleep=sleep)
            found = scan(source, "/v1/completions")
            await runner.run(pending_lines(source, "/v1/completions", found, frozenset()))

        asyncio.run(scenario())
        assert [result.ok for result in results] == [True] * 5
        assert len(slept) >= 2
        assert len(engine.added) == 5
