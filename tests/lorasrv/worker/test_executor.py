"""Steps that are collected one step late: the answers are those of an engine that waits for each of them."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from any_asks import MARKERS
from clock import Clock
from drafted import SCRIPTS, VOCAB, Ask, Drafted, mixed, oracle
from fake_gpu import FakeGpu
from late_executor import HeldBackTeam, LateExecutor, LaunchedAtOnce, ThreadedAtOnce, ThreadedInPart
from mispredict import expect_short_answers
from server import eventually
from tiny_engine import offline_engine

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.engine import core
from lorasrv.engine.pool_map import describe_pool
from lorasrv.memory.cost_model import Rate, StepCosts
from lorasrv.outputs import EngineOutput, FinishReason, Refusal, RequestId
from lorasrv.sampling_params import PLAIN_TEXT, BeamOptions, SamplingParams
from lorasrv.scheduler_output import ModelRunnerOutput, SchedulerOutput
from lorasrv.speculation.drafter import DraftQuery
from lorasrv.speculation.drafters import make_drafters
from lorasrv.speculation_params import SpeculationParams
from lorasrv.text.reasoning_budget import ReasoningBudget
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.executor import StepHandle
from sgmv_kernels.cpu_runtime import launch, team

PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NO_SPECULATION = SpeculationParams(max_draft=0)
LONG = tuple(10 + (7 * i) % 300 for i in range(200))
NAMES = (None, "one", "two", "three")


@pytest.fixture(scope="module", autouse=True)
def _with_a_helper() -> Iterator[None]:
    """On every machine; plans that an engine keeps are for a number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain_engine(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    """Each step is collected at once."""
    with closing(Drafted(model, library, max_num_batched_tokens=64)) as drafted:
        yield drafted


LATE = {
    "drafts": (LateExecutor, True),
    "ahead": (LateExecutor, False),
    "launched": (LaunchedAtOnce, False),
    "threads": (ThreadedAtOnce, False),
    "held back": (ThreadedAtOnce, False),
    "threads, drafts": (ThreadedInPart, True),
}


@pytest.fixture(params=LATE)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of engine. What is launched needs a GPU's events."""
    worlds = {"launched": FakeGpu(), "held back": patch.object(launch, "take_team", HeldBackTeam)}
    with worlds.get(request.param, nullcontext()):
        yield request.param


@pytest.fixture(scope="module")
def late_engines(model: Path, library: AdapterStore) -> Iterator[dict[str, Drafted]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                closing(Drafted(model, library, max_num_batched_tokens=64, late=late, drafters=None if drafts else []))
            )
            for name, (late, drafts) in LATE.items()
        }


@pytest.fixture
def late_engine(late_engines: dict[str, Drafted], kind: str) -> Drafted:
    return late_engines[kind]


@pytest.fixture
def late(late_engine: Drafted) -> LateExecutor | LaunchedAtOnce | ThreadedAtOnce:
    assert late_engine.late is not None
    late_engine.late.most_under_way = 0
    return late_engine.late


def _asks(rng: random.Random, tokenizer: Tokenizer) -> list[Ask]:
    asks = []
    for _ in range(rng.randrange(1, 6)):
        ids = tuple(rng.sample(range(VOCAB), 20)) if rng.random() < 0.3 else ()
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 9, 30]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1 << 32),
            stop_token_ids=ids,
            stop=("e",) if rng.random() < 0.2 else (),
            frequency_penalty=rng.choice([0.0, 0.5]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            ignore_eos=rng.random() < 0.5,
        )
        prompt = LONG[: rng.choice([1, 16, 40, 190])]
        aborts = rng.randrange(1, 9) if rng.random() < 0.1 else None
        asks.append(Ask(prompt, sampling, rng.choice(NAMES), rng.choice([1, 1, 3]), abort_after=aborts))
        own = random.Random(sampling.seed)
        if own.random() < 0.4:
            begun, limit = own.random() < 0.7, own.choice([0, 1, 2, 3, 7])
            budget = ReasoningBudget(own.choice(MARKERS), begun, limit, tokenizer, PLAIN_TEXT)
            plain = replace(sampling, max_tokens=30, frequency_penalty=0.0, logprobs=None, prompt_logprobs=None)
            asks[-1] = replace(asks[-1], sampling=plain, constraint=budget)
    return asks


def _agree(plain_engine: Drafted, late_engine: Drafted, asks: list[Ask], script: Any = None) -> None:
    want = plain_engine.run(asks)
    late_engine.drafter.answers = {rid: said.token_ids for rid, said in want.items()}
    got = late_engine.run(asks, script)
    for rid, said in want.items():
        if asks[int(rid.partition(".")[0])].abort_after is None:
            assert got[rid] == said, rid
        else:
            most = min(len(said.token_ids), len(got[rid].token_ids))
            assert got[rid].token_ids[:most] == said.token_ids[:most]
    assert not late_engine.engine._in_flight


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [None, "mixed", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("oracle", "liar"))]
)
def test_answers_are_the_same(
    plain_engine: Drafted, late_engine: Drafted, late: LateExecutor | LaunchedAtOnce, name: str | None
) -> None:
    rng = random.Random(name or "no drafts")
    for _ in range(8):
        _agree(plain_engine, late_engine, _asks(rng, plain_engine.tokenizer), None if name is None else SCRIPTS[name])
    assert late.most_under_way == 2


@pytest.mark.parametrize("preemption", [pytest.param("recompute", marks=pytest.mark.exhaustive), "swap"])
def test_preempted_ones_too(
    model: Path, library: AdapterStore, plain_engine: Drafted, preemption: str, kind: str
) -> None:
    late, drafts = LATE[kind]
    options = {"pages": 40, "adapter_floor": 0.0, "preemption_mode": preemption, "max_num_batched_tokens": 64}
    with closing(Drafted(model, library, late=late, drafters=None if drafts else [], **options)) as tight:
        expect_short_answers(tight.scheduler.predictor)
        budget = ReasoningBudget(MARKERS[0], True, 60, tight.tokenizer, PLAIN_TEXT)
        asks = [
            Ask(PROMPT, replace(GREEDY, max_tokens=90, temperature=t, seed=5), adapter, 2, limit)
            for t, adapter, limit in ((0.0, None, None), (0.9, None, budget), (0.0, "one", budget), (1.0, "two", None))
        ]
        for script in (None, mixed):
            before = tight.engine.metrics.stats().preemptions_total
            _agree(plain_engine, tight, asks, script)
            assert tight.engine.metrics.stats().preemptions_total > before


@pytest.mark.parametrize("kind", ["ahead", "launched", "threads"], indirect=True)
def test_the_next_step_computes_tokens_that_are_not_known_yet(late_engine: Drafted) -> None:
    """Two steps are under way from the first to the last but one, and no step is computed in vain."""
    [[message]] = late_engine.messages([Ask(PROMPT, GREEDY)], "ahead")
    late_engine.engine.add_request(message)
    before, said = late_engine.engine.metrics.stats().steps_total, []
    for number in range(GREEDY.max_tokens + 1):
        said.append(sum(len(output.new_token_ids) for output in late_engine.engine.step()))
        late_engine.engine.check_integrity()
        assert len(late_engine.engine._in_flight) == (number < GREEDY.max_tokens)
    assert said == [0, *[1] * GREEDY.max_tokens]
    assert late_engine.engine.metrics.stats().steps_total == before + GREEDY.max_tokens
    assert not late_engine.engine.has_requests


@pytest.mark.parametrize("kind", ["threads"], indirect=True)
def test_the_next_step_is_planned_late_but_before_the_pass_is_complete(
    late_engine: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the engine's thread computes; behind the end of the pass, planning would hide nothing. Steps that are
    collected before the next is planned say nothing about when."""
    pass_s, planning_s, update_s = 1.0, 0.1, 0.02
    clock, costs = Clock(), late_engine.engine._memory.costs
    executor, scheduler = late_engine.late, late_engine.scheduler
    ends, left = [0.0], list[float]()

    def submit(step: SchedulerOutput) -> StepHandle:
        if not executor._submitted:
            ends[0] = clock.now + pass_s
        return ThreadedAtOnce.submit(executor, step)

    def take_part(seconds: float) -> None:
        clock.now = max(clock.now, min(ends[0], clock.now + seconds))

    def schedule(**how: bool) -> SchedulerOutput:
        if executor._submitted:
            left.append(ends[0] - clock.now)
        clock.now += planning_s
        return type(scheduler).schedule(scheduler, **how)

    def collect(handle: StepHandle) -> ModelRunnerOutput:
        output = ThreadedAtOnce.collect(executor, handle)
        handle.pass_ended_s, clock.now = ends[0], max(clock.now, ends[0])
        ends[0] = clock.now + pass_s
        return output

    def update(step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        clock.now += update_s
        return type(scheduler).update_from_output(scheduler, step, output)

    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=clock, monotonic=clock))
    for of, doubles in ((executor, (submit, take_part, collect)), (scheduler, (schedule,))):
        for double in doubles:
            monkeypatch.setattr(of, double.__name__, double)
    monkeypatch.setattr(scheduler, "update_from_output", update)
    for name, fresh in (("lead", Rate(0.0)), ("lateness", Rate(0.0)), ("step", StepCosts())):
        monkeypatch.setattr(costs, name, fresh)
    penalized = replace(GREEDY, max_tokens=16, frequency_penalty=0.5)
    [[message], [other]] = late_engine.messages(
        [Ask(PROMPT, replace(GREEDY, max_tokens=120)), Ask(PROMPT, penalized)], "late"
    )
    late_engine.engine.add_request(message)
    for number in range(121):
        if number == 94:
            late_engine.engine.add_request(other)
        late_engine.engine.step()
    assert not late_engine.engine.has_requests
    # Of two threads, one goes on alone.
    assert costs.lead.seconds == pytest.approx(planning_s / 2)
    assert len(left) == 120 - penalized.max_tokens
    assert left[-16:-1] == pytest.approx([2 * planning_s] * 15, rel=0.2)


@pytest.mark.parametrize("kind", ["threads"], indirect=True)
def test_a_pass_ends_when_it_is_computed_not_when_it_is_asked_for(
    late_engine: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That tells how late the next step was planned, and counts as time between passes."""
    executor, profile, away_s, since = late_engine.late, late_engine.engine.profile, 0.05, list[float]()

    def collect(handle: StepHandle) -> ModelRunnerOutput:
        asked_s = time.perf_counter()
        output = ThreadedAtOnce.collect(executor, handle)
        since.append(asked_s - handle.pass_ended_s)
        return output

    # How long a tick is becomes known from passes whose ends are not waited for.
    late_engine.run([Ask(PROMPT, GREEDY)])
    monkeypatch.setattr(executor, "collect", collect)
    [[message]] = late_engine.messages([Ask(PROMPT, replace(GREEDY, max_tokens=6))], "asked")
    late_engine.engine.add_request(message)
    gaps, gap_s = profile.gaps, profile.gap_s
    while late_engine.engine.has_requests:
        late_engine.engine.step()
        eventually(lambda: team._shared._team is not None and not team._shared._team.is_open)
        time.sleep(away_s)
    assert min(since) > away_s / 2
    assert profile.gap_s - gap_s > (profile.gaps - gaps) * away_s / 2
    assert profile.gaps > gaps


@pytest.mark.parametrize("kind", ["ahead", "launched", "threads"], indirect=True)
def test_requests_that_need_the_text_have_a_token_a_step(late_engine: Drafted) -> None:
    """A step with one of them is collected before the next is planned, so that it is not held up."""
    penalized = replace(GREEDY, frequency_penalty=0.5)
    [[one], [other]] = late_engine.messages([Ask(PROMPT, GREEDY), Ask(PROMPT, penalized)], "text")
    for message in (one, other):
        late_engine.engine.add_request(message)
    said = [len(late_engine.engine.step()) for _ in range(GREEDY.max_tokens)]
    assert said == [2] * GREEDY.max_tokens
    assert not late_engine.engine.has_requests


@pytest.fixture(scope="module")
def default_engine(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    options = SpeculationOptions()
    drafters = make_drafters(options)
    assert {drafter.name for drafter in drafters} == {"grammar", "prediction", "lookup", "corpus"}
    with closing(Drafted(model, library, late=LaunchedAtOnce, drafters=drafters, speculation=options)) as engine:
        yield engine


class TestDefaults:
    """A server on a GPU plans ahead by default, and drafts by default: where nothing is drafted it does the one, where
    drafts pay the other."""

    def test_nothing_is_drafted_and_every_step_is_planned_ahead(self, default_engine: Drafted) -> None:
        engine, random_text = default_engine.engine, replace(GREEDY, temperature=1.0, seed=3)
        groups = default_engine.messages([Ask(PROMPT, random_text), Ask(LONG[:16], random_text)], "plain")
        for [message] in groups:
            engine.add_request(message)
        under_way = []
        with FakeGpu():
            while engine.has_requests:
                engine.step()
                engine.check_integrity()
                under_way.append(len(engine._in_flight))
        assert under_way == [1] * GREEDY.max_tokens + [0]
        assert not any(counts.drafted for counts in default_engine.scheduler.speculator.accounts.by_drafter.values())

    def test_reasoning_is_planned_ahead_until_its_end_is_forced_and_so_is_the_answer_behind_it(
        self, default_engine: Drafted
    ) -> None:
        engine = default_engine.engine
        budget = ReasoningBudget(MARKERS[0], True, 6, default_engine.tokenizer, PLAIN_TEXT)
        [[message]] = default_engine.messages([Ask(PROMPT, GREEDY, constraint=budget)], "behind")
        engine.add_request(message)
        under_way = list[int]()
        with FakeGpu():
            while engine.has_requests:
                engine.step()
                under_way.append(len(engine._in_flight))
        assert under_way[: budget.num_tokens] == [1] * (budget.num_tokens - 1) + [0]
        of_answer = GREEDY.max_tokens - budget.num_tokens - len(budget.end_ids)
        assert under_way[-of_answer:] == [1] * (of_answer - 1) + [0]

    def test_what_a_persona_has_said_before_is_drafted_in_far_fewer_steps(
        self, plain_engine: Drafted, default_engine: Drafted
    ) -> None:
        asks = [Ask(PROMPT, GREEDY, options={"speculation": SpeculationParams(remember=True)})]
        want = plain_engine.run(asks)
        with FakeGpu():
            assert default_engine.run(asks, salt="said") == want
            before = default_engine.steps
            assert default_engine.run(asks, salt="said") == want
        assert default_engine.steps - before < GREEDY.max_tokens / 2

    def test_drafts_come_and_go_beside_requests_without(
        self, model: Path, library: AdapterStore, plain_engine: Drafted
    ) -> None:
        """Drafts of one request are there for a part of its answer. The steps that verify them are collected at once,
        all others are planned ahead, and no answer misses a step."""
        drafting, plain = Ask(PROMPT, GREEDY), Ask(LONG[:16], GREEDY, options={"speculation": NO_SPECULATION})
        want = plain_engine.run([drafting, plain])
        with closing(Drafted(model, library, late=LaunchedAtOnce, max_num_batched_tokens=64)) as both, FakeGpu():
            both.drafter.answers = {rid: said.token_ids for rid, said in want.items()}
            seen: list[tuple[int, int]] = []
            submit = both.engine._submit

            def noted(step: Any) -> None:
                assert not (step.num_guessed_tokens and both.engine._in_flight), "planned before acceptance"
                assert step.is_awaited == bool(step.num_guessed_tokens)
                seen.append((len(step.requests), step.num_guessed_tokens))
                submit(step)

            both.engine._submit = noted  # type: ignore[method-assign]
            assert both.run([drafting, plain], in_the_middle) == want
        # From the ninth token on each step verifies what is left of the draft and says one token more.
        rows, drafts = zip(*seen, strict=True)
        assert sum(drafts) == 3 + 4
        assert list(map(bool, drafts)).count(True) == 2
        # `plain` has a token in each step, the other one ends earlier.
        assert rows == (2,) * (GREEDY.max_tokens - sum(drafts)) + (1,) * sum(drafts)

    @pytest.mark.parametrize(("lead_s", "pays"), [(0.0, True), (0.02, False)])
    def test_what_planning_ahead_saves_is_a_cost_of_drafts(
        self, model: Path, library: AdapterStore, lead_s: float, pays: bool
    ) -> None:
        """Nine answers take 10 ms a step, ahead; one of them has a draft, which is right in one of two cases."""
        with closing(Drafted(model, library, late=LaunchedAtOnce)) as late, FakeGpu():
            costs = late.built.parts.memory.costs
            costs.step.seconds_each = [10e-3, 0.0, 0.0, 0.0, 0.0, 0.0]
            costs.lead.seconds = lead_s
            asks = [Ask(PROMPT, GREEDY, options={} if i == 0 else {"speculation": NO_SPECULATION}) for i in range(9)]
            late.drafter.answers = {RequestId("0.0"): list(range(24))}
            late.drafter.script = oracle
            for [message] in late.messages(asks, "costs"):
                late.engine.add_request(message)
            with patch.object(type(costs), "observe_step"), patch.object(type(costs.lead), "observe"):
                late.engine.step()
                assert late.scheduler.expects_drafts() == pays
                late.engine.step()
                assert bool(late.engine._in_flight) != pays


def in_the_middle(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    """What comes next, from the ninth token to the sixteenth."""
    return right[:4] if 8 <= ask.request.num_generated_tokens < 16 else ()


def test_beams_are_found_too(plain_engine: Drafted, late_engine: Drafted) -> None:
    of_beams = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    beams = [Ask(PROMPT, of_beams, name, count=3, options={"beams": BeamOptions(3)}) for name in (None, "one")]
    _agree(plain_engine, late_engine, [*beams, Ask(PROMPT, GREEDY)])


class TestEnds:
    """A request that ends while a step is under way keeps its pages until the step is over, whose token is dropped."""

    def _under_way(self, late: Drafted, **options: Any) -> tuple[RequestId, set[int]]:
        """A request that has said some tokens, and whose next one is being computed, and its pages."""
        [[message]] = late.messages([Ask(PROMPT, GREEDY, "one", options=options)], "ends")
        late.engine.add_request(message)
        request = late.scheduler._queue.requests[message.request_id]
        for _ in range(40):
            late.engine.step()
            if request.num_generated_tokens >= 3 and request.num_in_flight_tokens:
                held = self._held(late)
                assert held
                return message.request_id, held
        raise AssertionError("it was never under way")

    def _is_over(self, late: Drafted, held: set[int]) -> list[Any]:
        """Pages stay until the step is collected; returns the outputs since."""
        late.engine.check_integrity()
        assert self._held(late) == held
        told = describe_pool(late.engine._memory, late.scheduler).requests
        assert {page for own in told for page in own.page_ids} == held
        assert late.engine.has_requests
        outputs = late.engine.step()
        late.engine.check_integrity()
        assert not late.scheduler._kv.holders()
        assert not late.engine.has_requests
        return outputs

    def _held(self, late: Drafted) -> set[int]:
        return {page for pages in late.scheduler._kv.holders().values() for page in pages}

    @pytest.mark.parametrize("method", ["abort", "stop"])
    def test_aborted_or_stopped(self, late_engine: Drafted, method: str) -> None:
        rid, held = self._under_way(late_engine)
        generated = late_engine.scheduler.counters.generated_tokens
        getattr(late_engine.engine, method)(rid)
        [output] = self._is_over(late_engine, held)
        want = FinishReason.ABORT if method == "abort" else FinishReason.STOP
        assert (output.finish_reason, output.new_token_ids) == (want, ())
        assert late_engine.scheduler.counters.generated_tokens == generated

    def test_out_of_time(self, late_engine: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
        self._under_way(late_engine, timeout_s=1000.0)
        clock = late_engine.scheduler._deadlines._clock
        monkeypatch.setattr(late_engine.scheduler._deadlines, "_clock", lambda: clock() + 1001.0)
        [output] = late_engine.engine.step()
        assert (output.refusal, output.new_token_ids) == (Refusal.TIMEOUT, ())
        assert not late_engine.scheduler._kv.holders()
        late_engine.engine.check_integrity()


@pytest.mark.parametrize("place", ["begin", "complete", "settle", "take_part"])
def test_an_interrupt_costs_nothing_but_the_answers_of_its_call(
    model: Path, adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with offline_engine(model, adapter_dirs, kernels="numba", quantization="int4", max_num_seqs=4) as llm:
        ask = partial(llm.generate, [PROMPT, LONG] * 3, GREEDY, [None, "one"] * 3)
        want = [answer.token_ids for answer in ask()]
        runner = llm.engine._parts.executor.runner
        for comes_first in (True, False):
            count, real = iter(range(1000)), getattr(runner, place)

            def interrupted(*args: Any, count: Any = count, real: Any = real, first: bool = comes_first) -> Any:
                is_now = next(count) == 9
                found = None if is_now and first else real(*args)
                if is_now:
                    raise KeyboardInterrupt
                return found

            with monkeypatch.context() as patch:
                patch.setattr(runner, place, interrupted)
                if place == "settle":  # never called so often
                    patch.setattr(llm.engine, "_settle", lambda step: runner.settle() or 0.0)
                with pytest.raises(KeyboardInterrupt):
                    ask()
            assert [answer.token_ids for answer in ask()] == want
            assert not llm.engine._scheduler._kv.holders()
            llm.engine.check_integrity()


class TestFailures:
    """A step that fails with another behind it: both are planned again, one at a time."""

    def test_a_request_that_cannot_be_computed_ends_and_the_others_go_on(
        self, plain_engine: Drafted, late_engine: Drafted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compute = late_engine.runner._batch

        def failing(step: Any, *last: Any) -> Any:
            if any(s.request_id == "1.0" and s.start >= len(PROMPT) + 3 for s in step.requests):
                raise RuntimeError("as asked")
            return compute(step, *last)

        asks = [Ask(LONG, GREEDY), Ask(PROMPT, GREEDY), Ask(PROMPT, GREEDY, "one"), Ask(PROMPT, GREEDY, "two")]
        want = plain_engine.run(asks)
        monkeypatch.setattr(late_engine.runner, "_batch", failing)
        late_engine.drafter.answers = {rid: said.token_ids for rid, said in want.items()}
        for script in (None, oracle):
            got = late_engine.run(asks, script)
            ended = got.pop(RequestId("1.0"))
            assert ended.finish is FinishReason.ERROR
            assert ended.token_ids == want[RequestId("1.0")].token_ids[: len(ended.token_ids)]
            assert got == {rid: said for rid, said in want.items() if rid != "1.0"}
            assert not late_engine.engine._is_serial

    def test_what_fails_once_changes_no_answer(
        self, plain_engine: Drafted, late_engine: Drafted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compute, count = late_engine.runner._batch, iter(range(1000))

        def failing(step: Any, *last: Any) -> Any:
            if next(count) % 3 == 2:
                raise MemoryError("as asked")
            return compute(step, *last)

        monkeypatch.setattr(late_engine.runner, "_batch", failing)
        _agree(plain_engine, late_engine, [Ask(LONG, GREEDY), Ask(PROMPT, GREEDY, "one"), Ask(PROMPT, GREEDY)])
        late_engine.engine.retrier._most_tokens = None
