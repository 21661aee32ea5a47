"""Several answers to one prompt (`n`): whole and streamed, each with its own text and end."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from answers import events
from fake_engine import CONTEXT, HANG, say

from api.serving.choice_stream import ChoiceStream
from lorasrv.errors import AdapterLoadFailed
from lorasrv.outputs import CLIENT, RequestId, RequestOutput, RequestTiming

pytestmark = pytest.mark.anyio
TEXTS = ("Hello", "wörld, how are you?", "x")


def by_index(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Each choice's chunks in order; a chunk holds one choice."""
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        found[choice["index"]].append(choice)
    return dict(found)


@pytest.fixture(autouse=True)
def three_texts(engine) -> None:
    engine.script = say(*TEXTS)


class TestWhole:
    def test_chat(self, server, engine) -> None:
        body = server.chat("hi", n=3, seed=5).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["message"]["content"] for choice in body["choices"]] == list(TEXTS)
        assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
        [added] = engine.added
        assert (added.count, added.sampling.seed) == (3, 5)

    def test_completion(self, server) -> None:
        choices = server.complete(n=2, max_tokens=5).json()["choices"]
        told = [(c["index"], c["text"], c["finish_reason"]) for c in choices]
        assert told == [(0, "Hello", "stop"), (1, "wörld", "length")]

    def test_the_prompt_counts_once(self, server, engine) -> None:
        engine.script = say(*TEXTS, cached=4)
        usage = server.chat("hi", n=3).json()["usage"]
        prompt, completion = len("user:hi"), sum(map(len, TEXTS))
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, completion)
        assert usage["total_tokens"] == prompt + completion
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}, "what the choices share among them is no cache"
        assert usage["lorasrv"]["preemptions"] == 0 + 1 + 2

    @pytest.mark.parametrize(("n", "count"), [(1, 1), (None, 1), (8, 8)])
    def test_counts(self, server, engine, n: int | None, count: int) -> None:
        engine.script = say("Hello")
        assert [c["message"]["content"] for c in server.chat(n=n).json()["choices"]] == ["Hello"] * count
        assert engine.added[0].count == count

    @pytest.mark.parametrize(("n", "best_of"), [(None, 1), (1, 1), (2, 2), (2, None)])
    def test_best_of_n_is_no_selection(self, server, n: int | None, best_of: int | None) -> None:
        for stream in (False, True):
            assert server.complete(n=n, best_of=best_of, stream=stream).status_code == 200

    def test_one_that_ends_with_an_error_fails_the_answer(self, server, engine, eventually) -> None:
        engine.script = say(*TEXTS, error="no numbers", choice=2)
        response = server.chat(n=3)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "no numbers")
        assert sorted(engine.aborted) == [f"{engine.added[0].id}#{i}" for i in (0, 1)]
        assert engine.request_stats.aborted == {"generation_failed": 2}

    def test_one_that_fails_fails_the_answer(self, server, engine) -> None:
        engine.breaks(3, choice=1)
        response = server.complete(n=3)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        assert set(engine.request_stats.aborted) == {"engine_dead"}

    def test_a_prompt_that_is_refused_ends_those_before_it(self, server, engine) -> None:
        response = server.complete(prompt=["x", "x" * CONTEXT])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert engine.request_stats.aborted == {"context_length_exceeded": 1}


class TestStreamed:
    def test_chat(self, server) -> None:
        *chunks, last = events(server.chat(n=3, stream=True, stream_options={"include_usage": True}))
        choices = by_index(chunks)
        assert sorted(choices) == [0, 1, 2]
        for index, text in enumerate(TEXTS):
            opening, *pieces = choices[index]
            assert opening["delta"] == {"role": "assistant", "content": ""}
            assert "".join(piece["delta"].get("content", "") for piece in pieces) == text
            assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] == len("user:hi")
        assert last["usage"]["completion_tokens"] == sum(map(len, TEXTS))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({chunk["id"] for chunk in chunks}) == 1

    def test_completion(self, server) -> None:
        chunks = events(server.complete(n=2, stream=True, max_tokens=100))
        texts = {i: "".join(c["text"] for c in pieces) for i, pieces in by_index(chunks).items()}
        assert texts == {0: TEXTS[0], 1: TEXTS[1]}
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order.index(1) < len(TEXTS[0]), "the second does not wait for the first one's end"
        ended = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks]
        assert [pair for pair in ended if pair[1]] == [(0, "stop"), (1, "stop")]
        assert len(ended) - ended.index((0, "stop")) > len(TEXTS[1]) - len(TEXTS[0])

    def test_continuous_usage_sums(self, server) -> None:
        response = server.complete(n=3, stream=True, stream_options={"continuous_usage_stats": True})
        counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
        assert counts == sorted(counts)
        assert counts[-1] == len(TEXTS[0]) + 16 + len(TEXTS[2])

    def test_an_error_is_the_last_event(self, server, engine, eventually) -> None:
        engine.breaks(2, choice=0)
        *before, last = events(server.chat(n=2, stream=True))
        assert last["error"]["code"] == "engine_dead"
        assert all("choices" in chunk for chunk in before)
        eventually(lambda: engine.aborted == [f"{engine.added[0].id}#1"])
        assert engine.request_stats.aborted == {"engine_dead": 2}

    def test_a_choice_that_ends_with_an_error_is_an_event(self, server, engine) -> None:
        engine.script = say(*TEXTS, error="no numbers", choice=0)
        *before, last = events(server.chat(n=2, stream=True))
        assert last["error"]["message"] == "no numbers"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in before)

    def test_a_failed_load_has_its_true_status(self, server, engine) -> None:
        engine.breaks(0, AdapterLoadFailed("damaged"))
        response = server.chat(n=2, stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_load_failed")

    def test_a_choice_that_hangs_delays_no_other(self, server, engine, eventually) -> None:
        engine.breaks(2, HANG, choice=0)
        with server.leaving(n=2, stream=True) as connection:
            received = connection.read_until(b'"finish_reason":"length"')
            assert received.count(b'"index":0') == 2
        eventually(lambda: engine.aborted == [f"{engine.added[0].id}#0"])


class TestDisconnects:
    @pytest.mark.parametrize("hang_after", [0, 3])
    @pytest.mark.parametrize("stream", [True, False])
    def test_every_choice_is_aborted(self, server, engine, eventually, stream: bool, hang_after: int) -> None:
        engine.script = say("a long text")
        engine.breaks(hang_after, HANG)
        with server.leaving(n=4, stream=stream) as connection:
            eventually(lambda: engine.added)
            if stream and hang_after:
                assert b"200 OK" in connection.read_until(b"\r\n")
            assert engine.aborted == []
        eventually(lambda: len(engine.aborted) == 4)
        assert sorted(engine.aborted) == [f"{engine.added[0].id}#{i}" for i in range(4)]

    def test_a_client_that_never_reads_is_not_read_ahead_for(self, server, engine, eventually) -> None:
        engine.script = say("x" * 40_000_000, chars=100_000)
        with server.leaving("/v1/chat/completions", n=2, stream=True):
            eventually(lambda: engine.added)
            engine.script = say("short")
            assert server.complete().json()["choices"][0]["text"] == "short"
        eventually(lambda: len(engine.aborted) == 2)


class Endless:
    """A stream that always has one more output, and counts how many were taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.closed = False

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        self.taken += 1
        return RequestOutput(RequestId("r"), "x", (1,), 1, self.taken, RequestTiming())

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        raise AssertionError("nothing of this stream is written at once")

    async def aclose(self, why: str = CLIENT) -> None:
        self.closed = True


class TestChoiceStream:
    async def test_it_reads_little_ahead_and_leaves_nothing_running(self) -> None:
        before, streams = asyncio.all_tasks(), [Endless(), Endless()]
        choices = ChoiceStream(streams)
        await choices.wait_for_first()
        assert (await anext(choices))[0] == 0
        for _ in range(100):
            await asyncio.sleep(0)
        assert all(1 <= stream.taken <= 4 for stream in streams)
        await choices.aclose()
        assert all(stream.closed for stream in streams)
        assert asyncio.all_tasks() == before

    async def test_the_first_output_that_was_waited_for_is_not_lost(self) -> None:
        choices = ChoiceStream([Endless()])
        await choices.wait_for_first()
        assert [(await anext(choices))[1].num_generated_tokens for _ in range(3)] == [1, 2, 3]
        await choices.aclose()

    async def test_every_stream_is_closed_even_if_closing_is_cancelled(self) -> None:
        streams = [Endless(), Endless()]
        choices = ChoiceStream(streams)
        await choices.wait_for_first()
        closing = asyncio.create_task(choices.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert all(stream.closed for stream in streams)
