"""Steps that fail: who must end does, with the books whole, and everybody else says what they would have said."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mispredict import expect_short_answers

import lorasrv.sampling.draft_verification
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine import step_retry as step_attempts
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import DeviceLost, EngineDead, OutOfMemory, PoisonRequest, StepFailed
from lorasrv.llm import LLM
from lorasrv.outputs import FinishReason, TokenLogprobs, refused
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import SchedulerOutput

BLOCK = 3 * 2 * 2 * 16 * 16 * 4
"""Bytes of a page in all layers: 3 layers, keys and values of 2 heads of 16 in float32."""
POISON = 7
LONG = [10 + (7 * i) % 300 for i in range(60)]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=10, temperature=1.3, seed=5, ignore_eos=True)
TELLING = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
WORK = (
    (LONG, GREEDY, "one"),
    (LONG[:45], DRAWN, None),
    (LONG[3:20], TELLING, "three"),
    (LONG[:33], GREEDY, "two"),
    (LONG[30:], DRAWN, "one"),
    (LONG[5:50], TELLING, None),
)


def _config(model: Path, pages: int = 400, preemption: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=pages * BLOCK),
        # A budget that makes prompts come in chunks, and seats that let some wait.
        scheduler=SchedulerOptions(max_num_batched_tokens=40, max_num_seqs=4, preemption_mode=preemption),
    )


def _llm(model: Path, adapter_dirs: dict[str, Path], **config: Any) -> LLM:
    llm = LLM(str(model), _config(model, **config))
    for name, folder in adapter_dirs.items():
        llm.add_adapter(name, folder)
    return llm


@pytest.fixture(scope="module")
def llm(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[LLM]:
    """A synchronous engine with three adapters, for tests that leave it whole."""
    with _llm(model, adapter_dirs) as llm:
        yield llm


@pytest.fixture
def make(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    """make(pages, preemption): another one."""
    made: list[LLM] = []

    def build(**config: Any) -> LLM:
        made.append(_llm(model, adapter_dirs, **config))
        return made[-1]

    yield build
    for one in made:
        one.close()


_SALTS = itertools.count()


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


def answers(
    llm: LLM, work: Sequence[Any] = WORK, at_step: Callable[[int], object] = lambda _: None, *, salted: bool = True
) -> list[Outcome]:
    """What each request came to: its tokens and probabilities, or why it was not served. Nothing is held then. Each
    call that is `salted` is a world of its own for the prefix cache."""
    salt = str(next(_SALTS)) if salted else ""
    messages = [replace(llm._message(*fields), cache_salt=salt) for fields in work]
    told: dict[str, list[Any]] = {message.request_id: [] for message in messages}
    for message in messages:
        llm.engine.add_request(message)
    step = 0
    while llm.engine.has_requests:
        step += 1
        assert step < 500, "the engine does not get on"
        at_step(step)
        for output in llm.engine.step():
            told[output.request_id].append(output)
        llm.engine.check_integrity()
    for output in llm.engine.step():
        told[output.request_id].append(output)
    assert llm.engine._memory.kv.num_pages == 0
    return [_outcome(told[message.request_id]) for message in messages]


def _outcome(outputs: list[Any]) -> Outcome:
    assert [output.finish_reason is not None for output in outputs].count(True) == 1
    if outputs[-1].finish_reason is FinishReason.ERROR:
        error = refused(outputs[-1])
        assert error is not None
        return error
    of_prompt = [one for output in outputs for one in output.prompt_logprobs or () if one is not None]
    of_answer = [one for output in outputs for one in output.logprobs]
    return Said([token for output in outputs for token in output.new_token_ids], [*of_prompt, *of_answer])


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[Outcome]:
    found = answers(llm)
    assert len({str(one) for one in found}) == len(WORK), "each must say something of its own"
    return found


def _fail_before(llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[SchedulerOutput], object]) -> None:
    """The model is not run."""
    run = llm.engine._parts.executor.runner.run

    def failing(step: SchedulerOutput) -> Any:
        fails(step)
        return run(step)

    monkeypatch.setattr(llm.engine._parts.executor.runner, "run", failing)


def _fail_after(llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[SchedulerOutput], object]) -> None:
    """It has run, and its result is lost."""
    run = llm.engine._parts.executor.runner.run

    def failing(step: SchedulerOutput) -> Any:
        found = run(step)
        fails(step)
        return found

    monkeypatch.setattr(llm.engine._parts.executor.runner, "run", failing)


def _fail_half_way(llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[SchedulerOutput], object]) -> None:
    """Between the layers, some of whose keys and values are written."""
    now: list[SchedulerOutput] = []
    _fail_before(llm, monkeypatch, lambda step: now.append(step))
    decoder = llm.engine._parts.executor.runner._decoder
    monkeypatch.setattr(decoder, "_program", None)  # else its parts are run as one
    mlp = decoder._mlp

    def failing(x: Any, layer: int, tables: Any) -> Any:
        if layer == 1:
            fails(now[-1])
        return mlp(x, layer, tables)

    monkeypatch.setattr(decoder, "_mlp", failing)


def _fail_in_sampling(llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: Callable[[SchedulerOutput], object]) -> None:
    now: list[SchedulerOutput] = []
    _fail_before(llm, monkeypatch, lambda step: now.append(step))
    real = lorasrv.sampling.draft_verification.sample_finite

    def failing(*arguments: Any) -> Any:
        fails(now[-1])
        return real(*arguments)

    monkeypatch.setattr(lorasrv.sampling.draft_verification, "sample_finite", failing)


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
def test_what_fails_once_fails_nobody(llm, undisturbed, monkeypatch: pytest.MonkeyPatch, place) -> None:
    failed = llm.engine.metrics.snapshot().requests_failed_total
    times = Times(1, 4, 9, 13, 17)
    place(llm, monkeypatch, times)
    assert answers(llm) == undisturbed
    assert times.calls > 20
    assert llm.engine.metrics.snapshot().requests_failed_total == failed


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
    before = llm.engine.metrics.snapshot().requests_failed_total

    def fails(step: SchedulerOutput) -> None:
        if any(POISON in share.history for share in step.scheduled):
            raise RuntimeError("forced")

    with monkeypatch.context() as broken:
        place(llm, broken, fails)
        work = list(WORK)
        prompt, sampling, name = work[victim]
        work[victim] = ([*prompt[:20], POISON, *prompt[21:]], sampling, name)
        found = answers(llm, work)
    assert isinstance(found[victim], StepFailed)
    others = [i for i in range(len(WORK)) if i != victim]
    assert [found[i] for i in others] == [undisturbed[i] for i in others]
    assert llm.engine.metrics.snapshot().requests_failed_total == before + 1


def test_what_a_failed_request_leaves_in_the_prefix_cache_is_right(make, undisturbed, monkeypatch) -> None:
    llm = make()
    times = Times(*range(4, 400))
    with monkeypatch.context() as broken:
        _fail_half_way(llm, broken, times)
        failed = answers(llm, salted=False)
    assert any(isinstance(one, StepFailed) for one in failed)
    assert answers(llm, salted=False) == undisturbed


@pytest.mark.parametrize(
    ("most", "error"),
    [
        (7, torch.OutOfMemoryError),
        *(pytest.param(most, MemoryError, marks=pytest.mark.long) for most in (1, 2, 7, 25)),
    ],
)
def test_short_of_memory_it_is_computed_in_parts(make, undisturbed, monkeypatch, most: int, error) -> None:
    llm = make()
    sizes = []

    def fails(step: SchedulerOutput) -> None:
        sizes.append(step.num_tokens)
        if step.num_tokens > most:
            raise error("forced")

    _fail_half_way(llm, monkeypatch, fails)
    assert answers(llm) == undisturbed
    assert sum(size > most for size in sizes) < 8, "what did not fit is not tried at every step"
    bound = llm.engine.retrier.most_tokens
    assert bound is not None
    assert bound <= most


def test_the_bound_is_forgotten_when_memory_is_there_again(llm, undisturbed, monkeypatch) -> None:
    monkeypatch.setattr(step_attempts, "CALM_STEPS", 3)
    _fail_before(llm, monkeypatch, Times(1, 2, error=MemoryError))
    assert answers(llm) == undisturbed
    assert llm.engine.retrier.most_tokens is None


def test_what_does_not_fit_alone_fails_alone_and_is_no_poison(llm, undisturbed, monkeypatch) -> None:
    known = dict(llm.engine.poison._records)

    def fails(step: SchedulerOutput) -> None:
        if any(share.history[0] == LONG[30] and share.start >= 8 for share in step.scheduled):
            raise MemoryError

    _fail_before(llm, monkeypatch, fails)
    found = answers(llm)
    assert isinstance(found[4], OutOfMemory)
    assert found[:4] + found[5:] == undisturbed[:4] + undisturbed[5:]
    assert llm.engine.poison._records == known
    assert llm.engine.retrier.most_tokens is None, "others do not pay for it"


def test_pages_that_do_not_get_to_host_memory_or_back_are_computed_again(llm, make, monkeypatch) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    work = [(LONG[i : i + 20], sampling, None) for i in range(4)]
    want = answers(llm, work)
    small = make(pages=6, preemption="swap")
    expect_short_answers(small.engine._parts.scheduler.predictor)
    memory = small.engine._parts.executor.runner._memory
    apply, failed = memory.apply, []

    def refusing(ops: Any) -> int:
        kind = type(ops[0]).__name__ if ops else ""
        if kind in ("SwapOut", "SwapIn") and kind not in failed:
            failed.append(kind)
            raise MemoryError
        moved: int = apply(ops)
        return moved

    monkeypatch.setattr(memory, "apply", refusing)
    assert answers(small, work) == want
    assert {"SwapOut", "SwapIn"} == set(failed)
    assert not memory._swapped


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


def _bookkeeping_fails(make, undisturbed, monkeypatch, method: str, steps: Sequence[int], every: int) -> list[int]:
    """Every `every`-th call below a method of the scheduler raises in turn, in these steps. Nobody may say anything
    wrong. Returns how often the engine went on, and how often it ended rather than to go on with books that are wrong.
    """
    # The same requests fail again and again here, and none of them is to blame.
    monkeypatch.setattr("lorasrv.engine.poison_requests.MAX_FAULTS", 10**9)
    tally = [0, 0]
    for at in steps:
        turn = 1
        llm = make()
        while True:
            counter = CallCounter(turn)
            scheduler = llm.engine._scheduler
            real = getattr(scheduler, method)

            def begin(step: int, at: int = at, real: Any = real, counter: Any = counter, on: Any = scheduler) -> None:
                monkeypatch.setattr(on, method, counter.around(real) if step == at else real)

            try:
                found = answers(llm, WORK, begin)
                tally[0] += 1
            except AssertionError as error:
                if "does not get on" in str(error):
                    raise
                found = list(undisturbed)
                tally[1] += 1
                llm = make()  # this one's process would have ended
            for one, want in zip(found, undisturbed, strict=True):
                assert isinstance(one, StepFailed) or one == want, f"step {at}, call {turn}"
            monkeypatch.setattr(scheduler, method, real)
            if counter.calls < turn:
                break
            turn += every
    return tally


@pytest.mark.parametrize(("method", "every"), [("schedule", 307), ("update_from_output", 97)])
def test_bookkeeping_that_fails_somewhere_ends_some_requests(make, undisturbed, monkeypatch, method, every) -> None:
    went_on, ended = _bookkeeping_fails(make, undisturbed, monkeypatch, method, (3,), every)
    assert went_on > ended


@pytest.mark.long
@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
def test_bookkeeping_that_fails_in_many_places_ends_some_requests(make, undisturbed, monkeypatch, method) -> None:
    went_on, ended = _bookkeeping_fails(make, undisturbed, monkeypatch, method, (1, 4, 11), 31)
    assert went_on > ended


def test_plans_that_keep_failing_end_the_engine(make, monkeypatch) -> None:
    llm = make()

    def broken() -> None:
        raise RuntimeError("forced")

    monkeypatch.setattr(llm.engine._scheduler, "schedule", broken)
    for fields in WORK:
        llm.engine.add_request(llm._message(*fields))
    assert llm.engine.step() == []  # nobody runs yet
    assert {output.finish_reason for output in llm.engine.step()} == {FinishReason.ERROR}
    assert not llm.engine.has_requests
    with pytest.raises(RuntimeError, match="forced"):
        llm.engine.step()


def test_a_lost_device_ends_the_engine(make, monkeypatch) -> None:
    llm = make()
    _fail_before(llm, monkeypatch, Times(1))
    monkeypatch.setattr(llm.engine.retrier, "_recover", lambda: False)
    llm.engine.add_request(llm._message(*WORK[1]))
    with pytest.raises(DeviceLost, match="RuntimeError"):
        llm.engine.step()


def test_a_request_in_two_faults_is_refused(model: Path, store: AdapterStore, monkeypatch) -> None:
    """By what it asks for, whatever its seed; another adapter, another prompt and another principal are not."""
    poisonous = [5, POISON, 9]

    async def main() -> None:
        engine = AsyncEngine.build(_config(model), store)
        runner = engine._engine._parts.executor.runner
        run = runner.run

        def fails(step: SchedulerOutput) -> Any:
            if any(POISON in share.token_ids for share in step.scheduled):
                raise RuntimeError("forced")
            return run(step)

        monkeypatch.setattr(runner, "run", fails)
        await engine.start()

        async def ask(prompt: list[int], **options: Any) -> int:
            sampling = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
            outputs = [output async for output in engine.generate(prompt, sampling, **options)]
            return outputs[-1].num_generated_tokens

        beside = asyncio.create_task(ask([5, 6, 9]))
        for _ in range(2):
            with pytest.raises(StepFailed):
                await ask(poisonous)
        with pytest.raises(PoisonRequest, match="2 times"):
            await ask(poisonous)
        for options in ({"adapter": store.resolve("one").key}, {"principal": "another"}):
            with pytest.raises(StepFailed):
                await ask(poisonous, **options)
        assert await beside == await ask([5, 6, 9]) == 5
        assert engine.is_alive
        await engine.shutdown()
        with pytest.raises(EngineDead):
            await ask([5, 6, 9])

    asyncio.run(main())
