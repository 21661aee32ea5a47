"""Steps that fail: requests that cannot be computed end, the accounts stay whole, and all others say what they would
have said, for every way of choosing tokens: nothing of a part that failed is counted twice."""

import asyncio
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from late_executor import LateExecutor
from mispredict import expect_short_answers
from tiny_engine import LONG, ask, drive, offline_engine

from adapter_store.spec import AdapterKey
from lorasrv.engine import step_retry
from lorasrv.engine.input_processor import further_choices
from lorasrv.errors import DeviceLost, OutOfMemory, PoisonRequest, StepFailed
from lorasrv.llm import LLM
from lorasrv.outputs import FinishReason, RequestId, TokenLogprobs, refused
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling import draft_verification
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.scheduler_output import SchedulerOutput, SwapIn

POISON = 7
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.3, seed=5)
TELLING = replace(GREEDY, logprobs=2, prompt_logprobs=1)
WORK = (
    (LONG, GREEDY, "one"),
    (LONG[:45], DRAWN, None),
    (LONG[3:20], TELLING, "three"),
    (LONG[:33], GREEDY, "two"),
    (LONG[30:], DRAWN, "one"),
    (LONG[5:50], TELLING, None),
)
SHAPE = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
"""A budget that makes prompts come in chunks, and slots that let some wait."""
_SALTS = itertools.count()


@pytest.fixture(scope="module")
def llm(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[LLM]:
    """A synchronous engine with three adapters, for tests that leave it whole."""
    with offline_engine(model, adapter_dirs, **SHAPE) as llm:
        yield llm


@pytest.fixture
def make(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    """make(**options): another one."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(offline_engine(model, adapter_dirs, **SHAPE | options))


@dataclass(frozen=True, eq=False)
class Said:
    """An answer. Two are equal if their tokens are, and their probabilities within 1e-4: torch's products of float32
    matrices, by which this base is kept, depend on the number of rows in the last digits."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Said) or self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return False
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


Outcome = Said | Exception
Fails = Callable[[SchedulerOutput], object]


def _outcome(outputs: Sequence[Any]) -> Outcome:
    """Return a request's tokens and probabilities, or why it was not served."""
    if outputs[-1].finish_reason is FinishReason.ERROR:
        error = refused(outputs[-1])
        assert error is not None
        return error
    of_prompt = [one for output in outputs for one in output.prompt_logprobs or () if one is not None]
    of_answer = [one for output in outputs for one in output.logprobs]
    return Said([token for output in outputs for token in output.new_token_ids], [*of_prompt, *of_answer])


def _message(
    llm: LLM, prompt: list[int], sampling: SamplingParams, name: str | None, beams: BeamOptions | None = None
) -> EngineCoreRequest:
    return llm._message(prompt, sampling, llm._find(name), beams)


def answers(
    llm: LLM,
    work: Sequence[Any] = WORK,
    at_step: Callable[[int], object] = lambda _: None,
    *,
    salt: str | None = None,
) -> list[Outcome]:
    """Answer the work. Without a salt no call finds the prefixes of another."""
    salt = str(next(_SALTS)) if salt is None else salt
    messages = [replace(_message(llm, *fields), cache_salt=salt) for fields in work]
    return [_outcome(outputs) for outputs in drive(llm, messages, at_step)]


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[Outcome]:
    found = answers(llm)
    assert len({str(one) for one in found}) == len(WORK), "each must say something of its own"
    return found


def _nothing(*_: object) -> None:
    pass


def _around(
    patch: pytest.MonkeyPatch, owner: Any, name: str, before: Callable[..., Any], after: Callable[..., Any] = _nothing
) -> None:
    """Have a function call others first and last."""
    real = getattr(owner, name)

    def wrapped(*arguments: Any) -> Any:
        before(*arguments)
        found = real(*arguments)
        after(*arguments)
        return found

    patch.setattr(owner, name, wrapped)


def _fail_before(llm: LLM, patch: pytest.MonkeyPatch, fails: Fails) -> None:
    """The model is not run."""
    _around(patch, llm.engine._parts.executor.runner, "run", fails)


def _fail_after(llm: LLM, patch: pytest.MonkeyPatch, fails: Fails) -> None:
    """It has run, and its result is lost."""
    _around(patch, llm.engine._parts.executor.runner, "run", _nothing, fails)


def _fail_half_way(llm: LLM, patch: pytest.MonkeyPatch, fails: Fails) -> None:
    """Between the layers, some of whose keys and values are written."""
    now: list[SchedulerOutput] = []
    _fail_before(llm, patch, now.append)
    decoder = llm.engine._parts.executor.runner._decoder
    patch.setattr(decoder, "_program", None)  # else its parts are run as one
    _around(patch, decoder, "_mlp", lambda x, layer, tables: fails(now[-1]) if layer == 1 else None)


def _fail_in_sampling(llm: LLM, patch: pytest.MonkeyPatch, fails: Fails) -> None:
    now: list[SchedulerOutput] = []
    _fail_before(llm, patch, now.append)
    _around(patch, draft_verification, "sample_finite", lambda *_: fails(now[-1]))


PLACES = (_fail_before, _fail_half_way, _fail_in_sampling, _fail_after)


class Times:
    """Raises at these calls, counted from 1."""

    def __init__(self, *numbers: int, error: type[Exception] = RuntimeError) -> None:
        self.calls = 0
        self._numbers, self._error = numbers, error

    def __call__(self, _: object) -> None:
        self.calls += 1
        if self.calls in self._numbers:
            raise self._error("forced")


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_once_ends_no_request(llm, undisturbed, monkeypatch: pytest.MonkeyPatch, place) -> None:
    failed = llm.engine.metrics.stats().requests_failed_total
    times = Times(1, 4, 9, 13, 17)
    place(llm, monkeypatch, times)
    assert answers(llm) == undisturbed
    assert times.calls > 20
    assert llm.engine.metrics.stats().requests_failed_total == failed


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        (_fail_half_way, 0),
        (_fail_in_sampling, 5),
        *(pytest.param(place, victim, marks=pytest.mark.long) for place in PLACES for victim in range(6)),
    ],
)
def test_one_that_cannot_be_computed_fails_alone(llm, undisturbed, monkeypatch, place, victim: int) -> None:
    # The same request is the victim in several places.
    monkeypatch.setattr("lorasrv.engine.poison_requests.MAX_FAULTS", 10**9)
    before = llm.engine.metrics.stats().requests_failed_total

    def fails(step: SchedulerOutput) -> None:
        if any(POISON in scheduled.history for scheduled in step.requests):
            raise RuntimeError("forced")

    work = list(WORK)
    prompt, sampling, name = work[victim]
    work[victim] = ([*prompt[:20], POISON, *prompt[21:]], sampling, name)
    place(llm, monkeypatch, fails)
    found = answers(llm, work)
    assert isinstance(found[victim], StepFailed)
    others = [i for i in range(len(WORK)) if i != victim]
    assert [found[i] for i in others] == [undisturbed[i] for i in others]
    assert llm.engine.metrics.stats().requests_failed_total == before + 1


def test_a_failed_request_leaves_right_pages_in_the_prefix_cache(make, undisturbed, monkeypatch) -> None:
    llm = make()
    with monkeypatch.context() as broken:
        _fail_half_way(llm, broken, Times(*range(4, 400)))
        assert any(isinstance(one, StepFailed) for one in answers(llm, salt=""))
    assert answers(llm, salt="") == undisturbed


@pytest.mark.parametrize(
    ("most", "error"),
    [
        (7, torch.OutOfMemoryError),
        *(pytest.param(most, MemoryError, marks=pytest.mark.long) for most in (1, 2, 7, 25)),
    ],
)
def test_short_of_memory_it_is_computed_in_parts(make, undisturbed, monkeypatch, most: int, error) -> None:
    llm, sizes = make(), []

    def fails(step: SchedulerOutput) -> None:
        sizes.append(step.num_tokens)
        if step.num_tokens > most:
            raise error("forced")

    _fail_half_way(llm, monkeypatch, fails)
    assert answers(llm) == undisturbed
    assert sum(size > most for size in sizes) < 8, "what did not fit is not tried at every step"
    assert llm.engine.retrier.most_tokens is not None
    assert llm.engine.retrier.most_tokens <= most


def test_the_bound_is_forgotten_when_memory_is_there_again(llm, undisturbed, monkeypatch) -> None:
    monkeypatch.setattr(step_retry, "CALM_STEPS", 3)
    _fail_before(llm, monkeypatch, Times(1, 2, error=MemoryError))
    assert answers(llm) == undisturbed
    assert llm.engine.retrier.most_tokens is None


def test_a_request_that_does_not_fit_alone_fails_alone_and_is_no_poison(llm, undisturbed, monkeypatch) -> None:
    known = dict(llm.engine._parts.poison._records)

    def fails(step: SchedulerOutput) -> None:
        if any(scheduled.history[0] == LONG[30] and scheduled.start >= 8 for scheduled in step.requests):
            raise MemoryError

    _fail_before(llm, monkeypatch, fails)
    found = answers(llm)
    assert isinstance(found[4], OutOfMemory)
    assert found[:4] + found[5:] == undisturbed[:4] + undisturbed[5:]
    assert llm.engine._parts.poison._records == known
    assert llm.engine.retrier.most_tokens is None, "others do not pay for it"


def test_pages_that_cannot_be_swapped_are_computed_again(llm, make, monkeypatch) -> None:
    work = [(LONG[i : i + 20], replace(GREEDY, max_tokens=40), None) for i in range(4)]
    want = answers(llm, work)
    small = make(pages=6, preemption_mode="swap")
    expect_short_answers(small.engine._parts.scheduler.predictor)
    memory, failed = small.engine._parts.executor.runner._memory, []

    def refuse_once(ops: Any) -> None:
        kind = type(ops[0]).__name__ if ops else ""
        if kind in ("SwapOut", "SwapIn") and kind not in failed:
            failed.append(kind)
            raise MemoryError

    _around(monkeypatch, memory, "apply", refuse_once)
    assert answers(small, work) == want
    assert {"SwapOut", "SwapIn"} == set(failed)
    assert not memory._swapped


def test_pages_that_cannot_come_back_are_computed_again_beside_a_step_in_flight(llm, make, monkeypatch) -> None:
    """The step is computed without the request, none of whose tokens are in flight then."""
    work = [(LONG[i : i + 20], replace(GREEDY, max_tokens=60 if i else 20), None) for i in range(4)]
    want = answers(llm, work)
    small = make(pages=9, preemption_mode="swap", max_num_batched_tokens=256, max_num_seqs=4)
    engine = small.engine
    late = engine._executor = LateExecutor(engine._executor)
    engine.retrier._run, engine.retrier._recover = lambda step: late.collect(late.submit(step)), late.recover
    expect_short_answers(engine._parts.scheduler.predictor)
    failed: list[str] = []

    def refuse_once(ops: Any) -> None:
        if ops and isinstance(ops[0], SwapIn) and not failed:
            failed.append(ops[0].request_id)
            raise MemoryError

    _around(monkeypatch, engine._parts.executor.runner._memory, "apply", refuse_once)
    assert answers(small, work) == want
    assert failed


class CallCounter:
    """Raises at the `turn`-th call of a Python function below `where`."""

    def __init__(self, turn: int) -> None:
        self.turn, self.calls = turn, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **fields: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                return function(*arguments, **fields)
            finally:
                sys.setprofile(before)

        return wrapped

    def _profile(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and "/lorasrv/" in frame.f_code.co_filename:
            self.calls += 1
            if self.calls == self.turn:
                raise RuntimeError(f"forced in {frame.f_code.co_qualname}")


def _break_at(
    at: int, patch: pytest.MonkeyPatch, owner: Any, method: str, broken: object, real: object, step: int
) -> None:
    patch.setattr(owner, method, broken if step == at else real)


# A call that raises while a generator is closed is heard of by its warning only.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("method", "steps", "every"),
    [
        ("schedule", (3,), 307),
        ("update_from_output", (3,), 97),
        *(pytest.param(m, (1, 4, 11), 31, marks=pytest.mark.long) for m in ("schedule", "update_from_output")),
    ],
)
def test_bookkeeping_that_fails_somewhere_ends_some_requests(
    make, undisturbed, monkeypatch, method: str, steps: Sequence[int], every: int
) -> None:
    """Every `every`-th call below a method of the scheduler raises in turn, in these steps. No request may say anything
    wrong. More often the engine goes on than it ends, rather than to go on with accounts that are wrong."""
    # The same requests fail again and again here, and none of them is to blame.
    monkeypatch.setattr("lorasrv.engine.poison_requests.MAX_FAULTS", 10**9)
    went_on = ended = 0
    for at in steps:
        turn, llm = 1, make()
        while True:
            counter, scheduler = CallCounter(turn), llm.engine._scheduler
            real = getattr(scheduler, method)
            breaks = partial(_break_at, at, monkeypatch, scheduler, method, counter.around(real), real)
            try:
                found = answers(llm, WORK, breaks)
                went_on += 1
            except AssertionError as error:
                if "does not get on" in str(error):
                    raise
                found = list(undisturbed)
                ended += 1
                llm = make()  # this one's process would have ended
            for one, want in zip(found, undisturbed, strict=True):
                assert isinstance(one, StepFailed) or one == want, f"step {at}, call {turn}"
            monkeypatch.setattr(scheduler, method, real)
            if counter.calls < turn:
                break
            turn += every
    assert went_on > ended


def test_plans_that_keep_failing_end_the_engine(make, monkeypatch) -> None:
    llm = make()
    monkeypatch.setattr(llm.engine._scheduler, "schedule", lambda ahead: Times(1)(None))
    for fields in WORK:
        llm.engine.add_request(_message(llm, *fields))
    assert llm.engine.step() == []  # no request runs yet
    assert {output.finish_reason for output in llm.engine.step()} == {FinishReason.ERROR}
    assert not llm.engine.has_requests
    with pytest.raises(RuntimeError, match="forced"):
        llm.engine.step()


def test_a_lost_device_ends_the_engine(make, monkeypatch) -> None:
    llm = make()
    _fail_before(llm, monkeypatch, Times(1))
    monkeypatch.setattr(llm.engine.retrier, "_recover", lambda: False)
    llm.engine.add_request(_message(llm, *WORK[1]))
    with pytest.raises(DeviceLost, match="RuntimeError"):
        llm.engine.step()


async def test_a_request_in_two_faults_is_refused(engine, keys, monkeypatch) -> None:
    """By what it asks for, whatever its seed; another adapter, another prompt and another principal are not."""

    def fails(step: SchedulerOutput) -> None:
        if any(POISON in scheduled.token_ids for scheduled in step.requests):
            raise RuntimeError("forced")

    async def say(prompt: list[int], key: AdapterKey | None = None, **options: Any) -> int:
        bias = ((POISON, -100.0),)  # an answer with it would fail, too
        sampling = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True, logit_bias=bias)
        return (await ask(engine, key, prompt, sampling=sampling, **options))[-1].num_generated_tokens

    _around(monkeypatch, engine._engine._parts.executor.runner, "run", fails)
    poisonous, beside = [5, POISON, 9], asyncio.ensure_future(say([5, 6, 9]))
    for _ in range(2):
        with pytest.raises(StepFailed):
            await say(poisonous)
    with pytest.raises(PoisonRequest, match="2 times"):
        await say(poisonous)
    for options in ({"key": keys["one"]}, {"principal": "another"}):
        with pytest.raises(StepFailed):
            await say(poisonous, **options)
    assert await beside == await say([5, 6, 9]) == 5


# Every way of choosing tokens.

PLAIN = SamplingParams(max_tokens=34, temperature=0.0, ignore_eos=True)
WAYS = (
    {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.1, "seed": 3, "watermark": True},
    {"fsd_alpha": 0.6},
    {"temperature": 1.4, "seed": 8, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "min_tokens": 4},
    {"temperature": 0.9, "seed": 1, "logit_bias": ((20, 3.0), (21, -5.0))},
)


class EveryThird:
    """A constraint that allows, after n tokens, those of which n is the rest by three: one step too many shows."""

    ends_answer = True

    def __init__(self, vocab_size: int) -> None:
        self._bits = [np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8) for _ in range(3)]
        for rest, bits in enumerate(self._bits):
            bits[rest:vocab_size:3] = 1

    def begin(self) -> "EveryThird.State":
        return self.State(self._bits)

    class State:
        error: str | None = None
        is_over, num_free = False, 0

        def __init__(self, bits: list[npt.NDArray[np.uint8]]) -> None:
            self._bits = bits
            self.count = 0

        @property
        def rest(self) -> "EveryThird.State":
            return self

        def advance(self, token_id: int) -> None:
            assert token_id % 3 == self.count % 3
            self.count += 1

        def allowed(self) -> npt.NDArray[np.int32]:
            return np.packbits(self._bits[self.count % 3], bitorder="little").view(np.int32)


def _every_way(llm: LLM) -> list[EngineCoreRequest]:
    """Every way, a grammar, three choices of one prompt and a group of beams."""
    prompt, drawn = LONG[:50], replace(PLAIN, temperature=1.2, seed=5)
    names = (None, "one", "two", "three", None)
    ways = enumerate(zip(WAYS, names, strict=True))
    messages = [_message(llm, prompt[i:], replace(PLAIN, **way), name) for i, (way, name) in ways]
    rule = EveryThird(llm.spec.vocab_size)
    key = llm.store.resolve("two").key
    ruled = replace(drawn, ignore_eos=False)
    ask = llm.input_processor.process
    options = RequestOptions(adapter_key=key, adapter_id="two", constraint=rule)
    messages.append(ask(RequestId("g"), prompt[4:], ruled, options))
    first = _message(llm, prompt[7:], drawn, "one")
    messages += [first, *further_choices(first, [RequestId("c.1"), RequestId("c.2")])]
    beams = _message(llm, prompt[:30], SamplingParams(max_tokens=8, temperature=0.0), "three", BeamOptions(3))
    messages += [beams, *further_choices(beams, [RequestId("b.1"), RequestId("b.2")])]
    return messages


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        (22, RuntimeError),
        *(
            pytest.param(pages, error, marks=pytest.mark.long)
            for pages, error in ((22, torch.OutOfMemoryError), (400, RuntimeError), (400, torch.OutOfMemoryError))
        ),
    ],
)
def test_every_way_of_choosing(make, monkeypatch: pytest.MonkeyPatch, pages: int, error: type[Exception]) -> None:
    """With room, and with so little that requests are swapped out and back meanwhile."""
    options = {"quantization": "int8", "max_num_seqs": 8, "preemption_mode": "swap", "target_itl_ms": None}
    calm, llm = (make(pages=pages, **options) for _ in range(2))
    for one in (calm, llm):
        expect_short_answers(one.engine._parts.scheduler.predictor)
    expected = list(map(_outcome, drive(calm, _every_way(calm))))
    assert len({str(said.tokens) for said in expected}) > len(WAYS) + 3
    chance, number, fails = random.Random(4), 0, frozenset[int]()

    class Steps:
        """Each step fails in some of its runs, of a request alone in the first at most, so that no request ends."""

        def on_step(self) -> None:
            nonlocal number, fails
            number, fails = 0, chance.choice([frozenset(), frozenset({1}), frozenset({1, 2}), frozenset({1, 3})])

        def on_part(self, part: SchedulerOutput) -> None:
            nonlocal number
            number += 1

    def before(step: SchedulerOutput) -> None:
        nonlocal when
        may = number == 1 or len(step.requests) > 1
        when = chance.choice(["before", "after"]) if number in fails and may and step.requests else None
        if when == "before":
            raise error("forced")

    def after(_: SchedulerOutput) -> None:
        if when == "after":
            raise error("forced")

    when: str | None = None
    llm.engine.retrier.fault_hook = Steps()
    _around(monkeypatch, llm.engine._parts.executor.runner, "run", before, after)
    assert list(map(_outcome, drive(llm, _every_way(llm)))) == expected
    if pages < 100:
        assert llm.engine.metrics.stats().swaps_total > 0
