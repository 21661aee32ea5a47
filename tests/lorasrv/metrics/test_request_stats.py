"""Counts, fading rates and durations of what is asked, on a clock of the test's."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.errors import ContextLengthExceeded, EngineOverloaded
from lorasrv.metrics import request_stats as module
from lorasrv.metrics.request_stats import FADE_S, REQUEST_LISTENER, FinishedRequestStats, RequestStats
from lorasrv.outputs import AdapterTier, FinishReason, Refusal, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams


@pytest.fixture
def now() -> SimpleNamespace:
    return SimpleNamespace(s=1000.0)


@pytest.fixture
def traffic(now: SimpleNamespace) -> RequestStats:
    return RequestStats(lambda: now.s)


def accept(traffic: RequestStats, number: int, adapter_id: str = "", arrived_s: float = 1000.0) -> RequestId:
    rid = RequestId(f"r{number}")
    traffic.on_accepted([EngineCoreRequest(rid, (1,), 9, SamplingParams(), adapter_id=adapter_id)], arrived_s)
    return rid


def output(rid: RequestId, tokens: int, *, last: bool = False) -> RequestOutput:
    return RequestOutput(rid, "", (), 1, tokens, RequestTiming(), finish_reason=FinishReason.LENGTH if last else None)


def test_tokens_count_once_and_durations_when_they_are_over(traffic: RequestStats, now: SimpleNamespace) -> None:
    rid = accept(traffic, 0, "mia")
    now.s += 0.5
    traffic.on_output(rid, output(rid, 1))
    now.s += 2.0
    traffic.on_output(rid, output(rid, 4))
    traffic.on_output(rid, output(rid, 5, last=True))
    traffic.on_finished(rid)
    traffic.on_output(rid, output(rid, 9))
    account = traffic.of("mia")
    assert (account.requests, account.tokens, traffic.total.tokens) == (1, 5, 5)
    assert (traffic.first_token.sum, traffic.inter_token.sum, traffic.request.sum) == (0.5, 2.0, 2.5)
    assert (traffic.first_token.count, traffic.inter_token.count, traffic.request.count) == (1, 4, 1)
    assert not traffic._open


def test_tokens_of_another_replica_are_counted_there(traffic: RequestStats) -> None:
    ends = []
    traffic.listeners.append(ends.append)
    rid, resumed = RequestId("r"), tuple(range(20))
    message = EngineCoreRequest(rid, (1,), 30, SamplingParams(), adapter_id="mia", resumed_token_ids=resumed)
    traffic.on_accepted([message], 1000.0)
    for tokens in (20, 21, 30):
        traffic.on_output(rid, output(rid, tokens, last=tokens == 30))
    traffic.on_finished(rid)
    assert (traffic.of("mia").tokens, traffic.total.tokens, ends[0].generated_tokens) == (10, 10, 10)


def test_tokens_of_a_fallback_are_the_bases(traffic: RequestStats) -> None:
    rid = accept(traffic, 0, "mia")
    traffic.on_output(rid, replace(output(rid, 5), timing=RequestTiming(fell_back=True)))
    counted = {name: (account.requests, account.tokens) for name, account in traffic.hottest(9)}
    assert counted == {"": (0, 5), "mia": (1, 0)}
    assert traffic.total.tokens == 5


def test_who_left_is_no_answer(traffic: RequestStats) -> None:
    rid = accept(traffic, 0)
    traffic.on_finished(rid, "client")
    traffic.on_output(rid, output(rid, 1, last=True))
    other = accept(traffic, 1)
    traffic.on_output(other, output(other, 0, last=True))  # nothing was generated
    traffic.on_finished(other)
    assert sum(traffic.request.counts) == sum(traffic.first_token.counts) == 0
    assert traffic.total.requests == 2
    assert not traffic._open


@pytest.mark.parametrize(
    ("last", "reason", "aborted", "answers"),
    [(None, "abort", {"client": 1}, 0), (FinishReason.ABORT, "abort", {"client": 1}, 0), ("length", "length", {}, 1)],
)
def test_an_abort_counts_as_what_the_engine_made_of_it(
    traffic: RequestStats, last: FinishReason | None, reason: str, aborted: dict[str, int], answers: int
) -> None:
    """Without a last output the engine has died."""
    ends: list[FinishedRequestStats] = []
    traffic.listeners.append(ends.append)
    rid = accept(traffic, 0)
    traffic.on_output(rid, output(rid, 3))
    if last is not None:
        traffic.on_output(rid, replace(output(rid, 4), finish_reason=FinishReason(last)))
    traffic.on_finished(rid, "client")
    assert [(end.reason, end.why, end.generated_tokens) for end in ends] == [(reason, "client", 3 + (last is not None))]
    assert (traffic.aborted, traffic.request.count) == (aborted, answers)


def test_a_steady_rate_is_that_rate_and_fades(traffic: RequestStats, now: SimpleNamespace) -> None:
    rid = accept(traffic, 0, "mia")
    for tokens in range(1, 2001):
        now.s += 0.05
        traffic.on_output(rid, output(rid, tokens))
    assert traffic.rate(traffic.of("mia")) == pytest.approx(20.0, rel=0.01)
    now.s += FADE_S
    assert traffic.rate(traffic.of("mia")) == pytest.approx(20.0 / math.e, rel=0.01)


def test_the_hottest_come_first(traffic: RequestStats, now: SimpleNamespace) -> None:
    for number, (name, tokens) in enumerate((("cold", 1), ("hot", 50), ("", 9))):
        rid = accept(traffic, number, name)
        traffic.on_output(rid, output(rid, tokens))
    assert [name for name, _ in traffic.hottest(2)] == ["hot", ""]
    assert traffic.of("nobody").requests == 0


def test_it_does_not_grow_for_ever(traffic: RequestStats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 3)
    for number, name in enumerate(("a", "b", "c", "a", "d")):
        traffic.on_finished(accept(traffic, number, name), "client")
    assert [name for name, _ in traffic.hottest(9)] == ["c", "a", "d"]


def test_who_has_a_token_and_who_has_not(traffic: RequestStats) -> None:
    first, second = accept(traffic, 0, "mia"), accept(traffic, 1, "tom")
    traffic.on_output(first, output(first, 1))
    assert dict(traffic.open()) == {"mia": True, "tom": False}
    traffic.on_finished(second, "client")
    traffic.on_output(first, output(first, 2, last=True))
    traffic.on_finished(first)
    assert not list(traffic.open())
    assert traffic.aborted == {"client": 1}


def test_whoever_listens_hears_of_the_end(traffic: RequestStats, now: SimpleNamespace) -> None:
    heard: list[FinishedRequestStats] = []
    own: list[FinishedRequestStats] = []

    def broken(_: FinishedRequestStats) -> None:
        raise ZeroDivisionError

    traffic.listeners += [broken, heard.append]
    accepted: list[str] = []
    listener = SimpleNamespace(on_request_accepted=accepted.append, on_request_finished=own.append)
    token = REQUEST_LISTENER.set(listener)
    rid = accept(traffic, 0, "mia")
    REQUEST_LISTENER.reset(token)
    other = accept(traffic, 1, "tom")
    now.s += 3.0
    timing = RequestTiming(queue_ms=500.0, load_ms=1500.0, num_cached_tokens=7, tier=AdapterTier.DISK)
    traffic.on_output(rid, RequestOutput(rid, "", (), 1, 1, timing))
    now.s += 2.0
    traffic.on_output(rid, RequestOutput(rid, "", (), 1, 4, timing, finish_reason=FinishReason.STOP))
    traffic.on_finished(rid)
    refused = RequestOutput(
        other, "", (), 1, 0, RequestTiming(), FinishReason.REFUSED, error="no", refusal=Refusal.COLD, retry_after_s=1.0
    )
    traffic.on_output(other, refused)
    traffic.on_finished(other)
    ended, unanswered = heard
    assert (accepted, own) == ([rid], [ended])
    assert (ended.adapter_id, ended.reason, ended.why, ended.tier) == ("mia", "stop", "", "disk")
    assert (ended.prompt_tokens, ended.cached_tokens, ended.generated_tokens) == (1, 7, 4)
    assert (ended.queue_s, ended.load_s, ended.prefill_s, ended.decode_s, ended.total_s) == (0.5, 1.5, 1.0, 2.0, 5.0)
    assert (unanswered.why, unanswered.first_token_s, unanswered.prefill_s) == ("adapter_cold", None, 0.0)
    assert traffic.rejected == {"adapter_cold": 1}


def test_what_was_not_accepted_is_counted_by_its_error(traffic: RequestStats) -> None:
    for error in (
        EngineOverloaded("full", retry_after_s=1.0),
        EngineOverloaded("full", retry_after_s=1.0),
        ContextLengthExceeded("long"),
        KeyboardInterrupt(),
    ):
        traffic.on_refused(error)
    assert traffic.rejected == {"engine_overloaded": 2, "context_length_exceeded": 1}
    assert traffic.aborted == {"client": 1}


def test_who_asked_last_is_remembered(traffic: RequestStats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 2)
    for number, (name, key) in enumerate((("mia", "k1"), ("tom", "k1"), ("eva", "k2"), ("kim", "k3"))):
        message = EngineCoreRequest(
            RequestId(f"r{number}"), (1,), 9, SamplingParams(), adapter_key=AdapterKey(key), adapter_id=name
        )
        traffic.on_accepted([message], 0.0)
    assert traffic.askers == {"k2": ("eva", "k2"), "k3": ("kim", "k3")}
