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
from api.auth.rate_limits import HEADERS, MAX_ACCOUNTS, RateLimiter, duration
from api.auth.scopes import GENERATING
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

CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny-base"}


def key(name: str = "ann", **limits: int) -> Caller:
    return Caller(name, frozenset({Scope.INFER}), ("*",), KeyLimits(**limits))


class Stream:
    """Says so many tokens, one at a time, or fails at once. `ahead`: the engine has generated so many more."""

    def __init__(self, tokens: int, error: Exception | None = None, prompt: int = 5, ahead: int = 0) -> None:
        self.request_id, self.num_prompt_tokens = "r", prompt
        self._tokens, self._error, self._ahead = tokens, error, ahead
        self._said = 0
        self.closed = False

    async def __anext__(self) -> Any:
        if self._error is not None:
            raise self._error
        self._said += 1
        return SimpleNamespace(num_generated_tokens=self._said, finished=self._said == self._tokens)

    @property
    def num_generated_tokens(self) -> int:
        return self._said + self._ahead

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def allowances(clock: Clock) -> RateLimiter:
    return RateLimiter(clock)


def at_once(add: Callable[[Any], Awaitable[Sequence[Any]]]) -> Callable[[], Awaitable[Any]]:
    """With nothing to be done before."""

    async def begin() -> Callable[[Any], Awaitable[Sequence[Any]]]:
        return add

    return begin


def admission_of(allowances: RateLimiter) -> AdmissionController:
    """Of an engine whose queue is never full."""
    engine: Any = SimpleNamespace(check_admission=lambda _: None)
    return AdmissionController(engine, allowances)


async def admit(
    allowances: RateLimiter, caller: Caller, prompts: int = 1, width: int = 1, tokens: int = 3, **how: Any
) -> list[Any]:
    async def add(_: object) -> Sequence[Any]:
        return [Stream(tokens, **how) for _ in range(width)]

    return await admission_of(allowances).admit(caller, [[n] for n in range(prompts)], width, at_once(add))


async def read(streams: Sequence[Any], most: int = 10**9) -> None:
    for stream in streams:
        for _ in range(most):
            if (await anext(stream)).finished:
                break


class TestRequestsPerMinute:
    def test_a_minutes_worth_at_once_then_steadily(self, allowances, clock) -> None:
        caller = key(requests_per_min=4)

        async def scenario() -> None:
            for _ in range(4):
                await admit(allowances, caller)
            with pytest.raises(LimitExceeded, match=r"4 requests per minute \(requests_per_min\)") as caught:
                await admit(allowances, caller)
            assert caught.value.retry_after_s == pytest.approx(15)
            clock.now += 14.9
            with pytest.raises(LimitExceeded):
                await admit(allowances, caller)
            clock.now += 0.1
            await admit(allowances, caller)
            clock.now += 3600
            for _ in range(4):
                await admit(allowances, caller)
            with pytest.raises(LimitExceeded):
                await admit(allowances, caller)

        asyncio.run(scenario())

    def test_what_was_told_to_wait_for_is_enough(self, allowances, clock) -> None:
        """Whatever the rate: the time said is neither too short nor more than needed."""

        async def scenario() -> None:
            for rate in (1, 7, 59, 60, 61, 997):
                caller = key(f"k{rate}", requests_per_min=rate)
                for _ in range(rate):
                    await admit(allowances, caller)
                for _ in range(20):
                    with pytest.raises(LimitExceeded) as caught:
                        await admit(allowances, caller)
                    clock.now += caught.value.retry_after_s
                    await admit(allowances, caller)

        asyncio.run(scenario())

    def test_each_prompt_is_one(self, allowances) -> None:
        caller = key(requests_per_min=5)

        async def scenario() -> None:
            await admit(allowances, caller, prompts=3, width=4)
            assert allowances.headers(caller)["x-ratelimit-remaining-requests"] == "2"
            with pytest.raises(LimitExceeded):
                await admit(allowances, caller, prompts=3)
            with pytest.raises(InvalidRequest, match=r"6 prompts.* 5 \(requests_per_min\)") as caught:
                await admit(allowances, caller, prompts=6)
            assert caught.value.param == "prompt"

        asyncio.run(scenario())

    def test_keys_do_not_share(self, allowances) -> None:
        async def scenario() -> None:
            await admit(allowances, key("ann", requests_per_min=1))
            await admit(allowances, key("bob", requests_per_min=1))
            for _ in range(9):
                await admit(allowances, ANYBODY)
            with pytest.raises(LimitExceeded):
                await admit(allowances, key("ann", requests_per_min=1))

        asyncio.run(scenario())

    def test_a_limit_that_changes(self, allowances) -> None:
        async def scenario() -> None:
            for _ in range(8):
                await admit(allowances, key(requests_per_min=10))
            await admit(allowances, key(requests_per_min=1))
            with pytest.raises(LimitExceeded):
                await admit(allowances, key(requests_per_min=1))
            await admit(allowances, key())

        asyncio.run(scenario())


class TestTokensPerMinute:
    def test_a_prompt_counts_at_once_and_an_answer_at_its_end(self, allowances, clock) -> None:
        caller = key(tokens_per_min=60)

        def left() -> str:
            return allowances.headers(caller)["x-ratelimit-remaining-tokens"]

        async def scenario() -> None:
            streams = await admit(allowances, caller, prompts=2, width=2, tokens=5, prompt=10)
            assert left() == "40", "choices share a prompt"
            await read(streams, most=4)
            assert left() == "40"
            await read(streams)
            assert left() == "20"
            (stream,) = await admit(allowances, caller, tokens=1000, prompt=15)
            await read([stream], most=65)
            await stream.aclose()
            # 60 below nothing: what was generated for a client that left counts.
            with pytest.raises(LimitExceeded, match=r"60 tokens per minute \(tokens_per_min\)") as caught:
                await admit(allowances, caller)
            assert caught.value.retry_after_s == pytest.approx(61)
            assert left() == "0"
            clock.now += 61
            await admit(allowances, caller)

        asyncio.run(scenario())


class TestAnswersAtATime:
    def test_choices_and_prompts_count(self, allowances, clock) -> None:
        caller = key(max_concurrent=6)

        async def scenario() -> None:
            streams = await admit(allowances, caller, prompts=2, width=2)
            await admit(allowances, caller, width=2)
            with pytest.raises(LimitExceeded, match=r"6 concurrent answers \(max_concurrent\)") as caught:
                await admit(allowances, caller)
            assert caught.value.retry_after_s >= 1
            await read(streams[:1])
            await admit(allowances, caller)
            with pytest.raises(InvalidRequest, match="7 concurrent answers") as never:
                await admit(allowances, caller, width=7)
            assert never.value.param == "n"

        asyncio.run(scenario())

    def test_they_are_given_back_once(self, allowances) -> None:
        caller = key(max_concurrent=2)

        async def scenario() -> None:
            for how in range(6):
                streams = await admit(allowances, caller, width=2)
                with pytest.raises(LimitExceeded):
                    await admit(allowances, caller)
                await read(streams, most=1 if how % 2 else 9)
                for stream in (*streams, *streams):
                    await stream.aclose()
            assert allowances._accounts["ann"].begun_s == []

        asyncio.run(scenario())

    def test_about_when_one_will_be_free(self, allowances, clock) -> None:
        caller = key(max_concurrent=1)

        async def scenario() -> None:
            for _ in range(40):
                streams = await admit(allowances, caller)
                clock.now += 20
                await read(streams)
            await admit(allowances, caller)
            clock.now += 5
            with pytest.raises(LimitExceeded) as caught:
                await admit(allowances, caller)
            assert caught.value.retry_after_s == pytest.approx(15, abs=0.1)

        asyncio.run(scenario())


class TestWhatIsRefusedCostsNothing:
    @pytest.fixture
    def caller(self) -> Caller:
        return key(requests_per_min=5, tokens_per_min=100, max_concurrent=4)

    @pytest.fixture
    def untouched(self, allowances, caller) -> Callable[[], None]:
        before = allowances.headers(caller)

        def check() -> None:
            assert allowances.headers(caller) == before
            assert allowances._accounts["ann"].begun_s == []

        return check

    def test_by_a_limit(self, allowances, caller, untouched) -> None:
        async def scenario() -> None:
            for how in ({"prompts": 6}, {"width": 5}):
                with pytest.raises(InvalidRequest):
                    await admit(allowances, caller, **how)
                untouched()

        asyncio.run(scenario())

    def test_at_the_engines_door(self, allowances, caller, untouched) -> None:
        opened: list[Stream] = []

        async def add(number: list[int]) -> Sequence[Any]:
            if number == [2]:
                raise EngineOverloaded("full", retry_after_s=1.0)
            opened.append(Stream(3))
            return opened[-1:]

        with pytest.raises(EngineOverloaded):
            asyncio.run(admission_of(allowances).admit(caller, [[n] for n in range(3)], 1, at_once(add)))
        assert [stream.closed for stream in opened] == [True, True]
        untouched()

    def test_by_the_engine(self, allowances, caller, untouched) -> None:
        async def scenario() -> None:
            streams = await admit(allowances, caller, width=2, error=AdapterLoadFailed("damaged"))
            with pytest.raises(AdapterLoadFailed):
                await anext(streams[0])
            for stream in streams:
                await stream.aclose()
            untouched()

        asyncio.run(scenario())

    def test_but_who_had_an_adapter_warmed_has_asked_for_that(self, allowances, caller) -> None:
        """Or it could have the pool filled with its adapters for nothing, without end."""

        async def scenario() -> None:
            for left in range(4, -1, -1):
                streams = await admit(allowances, caller, width=2, error=AdapterCold("cold", retry_after_s=1.0))
                for stream in streams:
                    with pytest.raises(AdapterCold):
                        await anext(stream)
                told = allowances.headers(caller)
                assert told["x-ratelimit-remaining-requests"] == str(left)
                assert told["x-ratelimit-remaining-tokens"] == "100", "none was computed"
            with pytest.raises(LimitExceeded):
                await admit(allowances, caller)
            assert allowances._accounts["ann"].begun_s == []

        asyncio.run(scenario())

    def test_what_was_begun_does(self, allowances, caller) -> None:
        async def scenario() -> None:
            streams = await admit(allowances, caller, width=2)
            await read(streams[:1], most=1)
            for stream in streams:
                await stream.aclose()
            told = allowances.headers(caller)
            assert (told["x-ratelimit-remaining-requests"], told["x-ratelimit-remaining-tokens"]) == ("4", "94")

        asyncio.run(scenario())

    def test_what_nobody_read_does(self, allowances, caller) -> None:
        """Who stops reading has the tokens computed all the same."""

        async def scenario() -> None:
            [stream] = await admit(allowances, caller, tokens=90, ahead=60)
            await read([stream], most=1)
            await stream.aclose()
            assert allowances.headers(caller)["x-ratelimit-remaining-tokens"] == str(100 - 5 - 61)

        asyncio.run(scenario())

    def test_what_ran_out_of_time_does(self, allowances, caller) -> None:
        """Else whoever sets a short timeout_s has its prompts computed for nothing."""

        async def scenario() -> None:
            [stream] = await admit(allowances, caller, prompt=70, error=RequestTimeout("too late"))
            with pytest.raises(RequestTimeout):
                await anext(stream)
            told = allowances.headers(caller)
            assert (told["x-ratelimit-remaining-requests"], told["x-ratelimit-remaining-tokens"]) == ("4", "30")
            assert allowances._accounts["ann"].begun_s == []

        asyncio.run(scenario())


def test_accounts_are_bounded(allowances, clock) -> None:
    async def scenario() -> None:
        held = await admit(allowances, key("busy", max_concurrent=1))
        for number in range(2 * MAX_ACCOUNTS):
            allowances.check(key(f"k{number}", requests_per_min=1))
        assert len(allowances._accounts) <= MAX_ACCOUNTS
        assert "busy" in allowances._accounts
        await read(held)

    asyncio.run(scenario())


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

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, server: Any) -> Iterator[None]:
        yield
        assert all(not account.begun_s for account in self.allowances._accounts.values())

    @pytest.fixture
    def server(self, make_server, dispatcher, callers) -> Any:
        server = make_server()
        self.services = dispatcher[0].app.state.services
        self.allowances = self.services.admission.rate_limiter
        with_callers(dispatcher[0].app, callers)
        return server

    def ask(self, server: Any, path: str, body: Any, who: str = "ann") -> httpx2.Response:
        response: httpx2.Response = server.http.post(path, json=body, headers={"x-caller": who})
        return response

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "stream": True}),
            ("/v1/completions", {"model": "tiny-base", "prompt": "hi"}),
            ("/generate", {"inputs": "hi"}),
            ("/generate_stream", {"inputs": "hi"}),
            ("/", {"inputs": "hi", "stream": True}),
        ],
    )
    def test_requests(self, server, engine, path: str, body: dict[str, Any]) -> None:
        engine.tokenizer = SimpleNamespace(
            encode=lambda text, **_: list(text.encode()), special_ids=frozenset(), token=str
        )
        left = []
        for _ in range(3):
            response = self.ask(server, path, body)
            assert response.status_code == 200, response.text
            left.append(response.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
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
        assert self.ask(server, path, body, "bob").status_code == 200
        assert not set(HEADERS) & self.ask(server, path, body, "bob").headers.keys()

    def test_warming_is_a_request(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        warm = "/v1/adapters/mia:warm"
        assert [self.ask(server, warm, {}).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [asked[0] for asked in engine.asked].count("warm") == 3
        assert self.ask(server, warm, {}, "bob").status_code == 200

    def test_whatever_changes_or_computes_something_is_a_request(self, server, callers) -> None:
        """A route that nobody thought of as well; what only shows something is none."""
        callers["ann"] = key("ann", requests_per_min=2)
        assert self.ask(server, "/tokenize", {"prompt": 3}).headers["x-ratelimit-remaining-requests"] == "1"
        assert server.http.delete("/v1/adapters/mia", headers={"x-caller": "ann"}).status_code == 404
        routes = [r for module in _ROUTES for r in module.router.routes if isinstance(r, APIRoute)]
        asked = {(method, re.sub(r"{[^}]*}", "x", route.path)) for route in routes for method in route.methods}
        asked -= {("POST", path) for path in GENERATING}
        assert len(asked) > 35
        answers = {each: server.http.request(*each, headers={"x-caller": "ann"}).status_code for each in asked}
        free = {("POST", "/v1/batches/x/cancel")}
        assert {each for each, status in answers.items() if status == 429} == {
            each for each in asked if each[0] not in ("GET", "HEAD") and each not in free
        }
        assert answers["POST", "/v1/batches/x/cancel"] == 404

    def test_which_a_debt_of_tokens_is_not_in_the_way_of(self, server, callers) -> None:
        callers["ann"] = key("ann", requests_per_min=5, tokens_per_min=10)
        assert self.ask(server, "/v1/completions", {"model": "tiny-base", "prompt": "x" * 100}).status_code == 200
        assert self.ask(server, "/v1/completions", {"model": "tiny-base", "prompt": "x"}).status_code == 429
        assert server.http.delete("/v1/adapters/mia", headers={"x-caller": "ann"}).status_code == 404

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
    def test_grammars_count_while_they_are_compiled(self, server, engine, monkeypatch, path: str) -> None:
        """Who may have two answers at a time has no third grammar compiled meanwhile; and refused ones cost nothing."""
        seen: list[Any] = []

        async def compile_(*_: object) -> None:
            seen.append(len(self.allowances._accounts["ann"].begun_s))
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
        response = self.ask(server, "/v1/completions", {"model": "tiny-base", "prompt": "x" * 400})
        used = response.json()["usage"]["total_tokens"]
        refused = self.ask(server, "/v1/completions", {"model": "tiny-base", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_exceeded")
        assert engine.request_stats.rejected["limit_exceeded"] >= 1, "counted, though the engine never heard of it"
        assert used - 60 <= int(refused.headers["retry-after"]) <= used - 59 + 1
        assert refused.headers["x-ratelimit-limit-tokens"] == "60"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"

    def test_other_refusals_cost_nothing(self, server, engine) -> None:
        for body in ({"model": "nobody", "prompt": "hi"}, {"model": "tiny-base", "prompt": [400]}):
            assert self.ask(server, "/v1/completions", body).status_code in (400, 404)
        engine.add_error = EngineOverloaded("full", retry_after_s=1.0)
        refused = self.ask(server, "/v1/chat/completions", CHAT)
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "3"

    @pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 2}, {"prompt": ["a", "b"], "stream": True}])
    def test_a_client_that_leaves(self, server, engine, eventually, fields: dict[str, Any]) -> None:
        """Whatever it had is free again, streamed or not."""
        engine.breaks(2, HANG)
        body = {"model": "tiny-base", "prompt": "hi", **fields}
        width = 2 if len(fields) > 1 or "n" in fields else 1

        leaving = server.leaving("/v1/completions", "x-caller: ann", **body)
        eventually(lambda: self.allowances._accounts.get("ann") and self.allowances._accounts["ann"].begun_s)
        assert len(self.allowances._accounts["ann"].begun_s) == width
        if width == 2:
            refused = self.ask(server, "/v1/completions", body)
            assert refused.status_code == 429
            assert "2 concurrent answers (max_concurrent)" in refused.json()["error"]["message"]
        leaving.socket.close()
        eventually(lambda: not self.allowances._accounts["ann"].begun_s)
        engine.script = say()
        assert self.ask(server, "/v1/completions", {"model": "tiny-base", "prompt": "hi"}).status_code == 200

    def test_batches_count_and_wait(self, server, engine, callers, tmp_path) -> None:
        """A batch's line that is one too many waits as long as it was told, and is asked again."""
        clock = Clock()
        services = replace(self.services, admission=AdmissionController(engine, RateLimiter(clock)))
        caller = replace(callers["ann"], limits=KeyLimits(requests_per_min=2))
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.now += 2 * seconds

        class Sink(list[Any]):
            def add(self, result: Any) -> None:
                self.append(result)

            def flush(self) -> None:
                pass

        body = {"model": "tiny-base", "prompt": "x"}
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(5)]
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(map(json.dumps, lines)))

        async def scenario() -> Sink:
            sink: Any = Sink()
            runner = LineRunner(
                in_process_client(services, caller), sink, slots=asyncio.Semaphore(1), concurrency=1, sleep=sleep
            )
            found = scan(source, "/v1/completions")
            await runner.run(pending_lines(source, "/v1/completions", found, frozenset()))
            return sink

        results = asyncio.run(scenario())
        assert [result.ok for result in results] == [True] * 5
        assert len(slept) >= 2
        assert len(engine.added) == 5
