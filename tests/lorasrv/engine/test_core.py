"""Requests on a real model, step by step: who has its tokens when, under each policy, limit and deadline, and that they
are the right ones whatever happened on the way. Order and counts only: clock, costs and steps are the test's."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from clock import Clock
from mispredict import expect_short_answers
from tiny_engine import (
    BLOCK,
    PATIENCE_S,
    collect,
    engine_config,
    marked_options,
    offline_engine,
    running,
    tokens,
    until,
)

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import POLICIES, Limits
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.request_stream import RequestStream
from lorasrv.errors import InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.memory.cost_model import StepCosts
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.request import RequestOptions, RequestStatus
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.scheduler_output import ModelRunnerOutput, PageOp, SchedulerOutput, SwapIn
from lorasrv.worker.device import compute_alone, compute_in_parallel
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.rehearsal import WARM_UP_STEP

LONG = [10 + (7 * i) % 300 for i in range(400)]
NAMES = (None, "one", "two", "three")
OPTIONS = {"pages": 600, "enable_prefix_caching": False, "swap_bytes": 64 * BLOCK, "target_itl_ms": None}


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Gate:
    """Stands before the model: notes every step, and while it is shut lets only those pass that are allowed to."""

    def __init__(self, runner: ModelRunner) -> None:
        self.steps: list[SchedulerOutput] = []
        # Warm-up steps, which belong to no request.
        self.num_warm_up = 0
        self._run = runner.run
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._is_held = False
        runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step is WARM_UP_STEP:
            self.num_warm_up += 1
        elif step.requests:
            with self._changed:
                self._is_held = True
                assert self._changed.wait_for(self._may_pass, PATIENCE_S), "the engine was not let go on"
                self._is_held = False
                if self._allowed is not None:
                    self._allowed -= 1
                self.steps.append(step)
        return self._run(step)

    def shut(self) -> None:
        self._let(0)

    def open(self) -> None:
        self._let(None)

    async def held(self) -> None:
        """Wait until a step is planned and waits."""
        await until(lambda: self._is_held and not self._may_pass())

    async def pass_on(self, count: int = 1) -> None:
        """Let so many steps pass, until one more is planned and waits."""
        end = len(self.steps) + count
        self._let(count)
        await until(lambda: len(self.steps) == end and self._is_held)

    def named(self, since: int = 0) -> list[list[str]]:
        """Return whose tokens were in each step."""
        return [[_label(scheduled.request_id) for scheduled in step.requests] for step in self.steps[since:]]

    def _may_pass(self) -> bool:
        return self._allowed is None or self._allowed > 0

    def _let(self, count: int | None) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()


@dataclass
class World:
    """A live engine and what tests hold of it. Requests are called by their label; the adapter's account is `who`."""

    engine: AsyncEngine
    gate: Gate
    clock: Clock
    keys: dict[str | None, AdapterKey | None]
    streams: dict[str, RequestStream] = field(default_factory=dict)

    @property
    def scheduler(self) -> Any:
        return self.engine._engine._scheduler

    async def add(
        self, label: str, prompt: Sequence[int], tokens: int, adapter: str | None = None, who: str = "", **options: Any
    ) -> RequestStream:
        """Queue a request; it is in the engine's inbox when this returns."""
        asked = RequestOptions(adapter_key=self.keys[adapter], adapter_id=who or adapter or "", **options)
        self.streams[label] = await self.engine.add(prompt, _greedy(tokens), asked, request_id=label)
        return self.streams[label]

    async def hold(self, *warm: str) -> None:
        """Shut the gate, with a request before it that is over with this step: what is added next is seen together."""
        for name in warm:
            await self.engine.warm(self.keys[name], PATIENCE_S)
        self.gate.shut()
        await self.add("opener", [5, 6, 7], 1)
        await self.gate.held()

    async def tokens(self, label: str) -> list[int]:
        return tokens(await collect(self.streams[label]))

    def requests(self) -> dict[str, Any]:
        """Return the scheduler's requests by label; only while the engine is held."""
        return {_label(request.request_id): request for request in self.scheduler.requests()}


def _label(request_id: str) -> str:
    return request_id.partition("#")[0]


@pytest.fixture(scope="module")
def alone(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., list[int]]]:
    """alone(prompt, tokens, adapter): what a roomy engine says to it, one request at a time."""
    known: dict[tuple[Any, ...], list[int]] = {}
    compute_alone()
    with offline_engine(model, adapter_dirs, **OPTIONS) as llm:

        def answer(prompt: list[int], tokens: int, adapter: str | None = None) -> list[int]:
            asked = (tuple(prompt), tokens, adapter)
            if asked not in known:
                known[asked] = list(llm.generate([prompt], _greedy(tokens), [adapter])[0].token_ids)
            return known[asked]

        yield answer
    compute_in_parallel()


@pytest.fixture
async def world(
    request: pytest.FixtureRequest, model: Path, store: AdapterStore, keys, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """Run an engine with the options of the test's `engine` marker, as the `engine` fixture does."""
    clock, make = Clock(), MemoryManager.make
    monkeypatch.setattr(MemoryManager, "make", lambda *args, **known: make(*args, **known, clock=clock))
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr("lorasrv.worker.device.ENGINE_THREADS", 1)
    options = marked_options(request, **OPTIONS)
    engine = AsyncEngine.build(engine_config(model, **options), store)
    world = World(engine, Gate(engine._engine._parts.executor.runner), clock, keys)
    async with running(engine):
        try:
            yield world
        finally:
            world.gate.open()


async def test_a_step_is_computed_before_the_first_request(world: World, alone) -> None:
    """What the first step after a start costs, no request waits for; it leaves nothing behind."""
    await until(lambda: world.gate.num_warm_up)
    await world.add("one", LONG[:20], 8)
    assert await world.tokens("one") == alone(LONG[:20], 8)
    assert (world.gate.num_warm_up, world.gate.named()[0]) == (1, ["one"])


@pytest.mark.parametrize("scheduling_policy", POLICIES)
@pytest.mark.engine("scheduling_policy", max_num_seqs=2)
async def test_a_begun_request_keeps_its_slot_but_under_mlfq(world: World, alone, scheduling_policy: str) -> None:
    """There it keeps its pages meanwhile, and goes on where it was."""
    await world.hold()
    for i in range(2):
        await world.add(f"old {i}", LONG[i : i + 20], 12, priority=1)
    await world.gate.pass_on(5)
    seen = len(world.gate.steps)
    await world.add("urgent", LONG[40:60], 5, priority=-1)
    await world.gate.pass_on(3)
    if scheduling_policy == "mlfq":
        assert world.requests()["old 1"].status is RequestStatus.RUNNING, "it waits for its slot, not for its pages"
    world.gate.open()
    for label, at, count in (("old 0", 0, 12), ("old 1", 1, 12), ("urgent", 40, 5)):
        assert await world.tokens(label) == alone(LONG[at : at + 20], count)
    beside = [names for names in world.gate.named(seen) if "urgent" in names]
    first = world.gate.named(seen).index(beside[0])
    assert (first <= 1) == (scheduling_policy == "mlfq")
    assert len(beside) == 5
    if scheduling_policy == "mlfq":
        assert beside == [["old 0", "urgent"]] * 5, "the newer of the two has its slot back afterwards"
    assert world.engine.metrics.stats().preemptions_total == 0


@pytest.mark.engine(scheduling_policy="fair", max_num_seqs=4)
async def test_an_account_below_its_share_takes_a_slot_under_fair(world: World, alone) -> None:
    """The one that loses it keeps its pages meanwhile, and goes on where it was."""
    await world.hold("one", "two")
    asks = {f"hot {i}": (LONG[i : i + 20], 40, "one") for i in range(6)}
    for label, ask in asks.items():
        await world.add(label, *ask)
    await world.gate.pass_on(4)
    seen = len(world.gate.steps)
    await world.add("cool", LONG[40:60], 8, "two")
    await world.gate.pass_on(3)
    assert any("cool" in names for names in world.gate.named(seen)[:2])
    paused = [request.status for request in world.requests().values() if request.is_paused]
    assert paused == [RequestStatus.RUNNING], "it waits for its slot, not for its pages"
    world.gate.open()
    for label, ask in (asks | {"cool": (LONG[40:60], 8, "two")}).items():
        assert await world.tokens(label) == alone(*ask)
    assert world.engine.metrics.stats().preemptions_total == 0
    assert all(len(names) <= 4 for names in world.gate.named())


@pytest.mark.parametrize("preemption_mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.parametrize("scheduling_policy", POLICIES)
@pytest.mark.engine("scheduling_policy", "preemption_mode", pages=20, max_num_seqs=4, max_num_batched_tokens=64)
async def test_every_policy_says_the_same(world: World, alone, scheduling_policy: str, preemption_mode: str) -> None:
    """More requests than slots, more answers than pages; under mlfq they lose slots as well."""
    expect_short_answers(world.scheduler.predictor)
    await world.hold("one", "two", "three")
    asks = {f"r{i}": (LONG[5 * i : 5 * i + 20], 30 + 13 * (i % 4), NAMES[i % 4]) for i in range(12)}
    for i, (label, ask) in enumerate(asks.items()):
        await world.add(label, *ask, priority=i % 2)
    world.gate.open()
    for label, ask in asks.items():
        assert await world.tokens(label) == alone(*ask), label
    stats = world.engine.metrics.stats()
    assert stats.preemptions_total > 0
    assert (stats.swaps_total > 0) == (preemption_mode == "swap")
    assert all(len(names) <= 4 for names in world.gate.named())


@pytest.mark.parametrize(
    ("target_itl_ms", "max_num_batched_tokens", "chunk"),
    [(None, 512, 300), (None, 64, 60), (44.5, 512, 40), (0.001, 512, 16)],
)
@pytest.mark.engine("target_itl_ms", "max_num_batched_tokens", max_num_seqs=8, target_itl_ratio=None)
async def test_a_long_prompt_takes_its_chunk_only(
    world: World, alone, target_itl_ms: float | None, max_num_batched_tokens: int, chunk: int
) -> None:
    world.engine._engine._memory.costs.step.seconds_each = [0.0, 1e-3, 0.0, 0.0, 0.0, 0.0]
    await world.hold("one", "two", "three")
    asks = {f"stream {i}": (LONG[i : i + 10], 60, name) for i, name in enumerate(NAMES)}
    for label, ask in asks.items():
        await world.add(label, *ask)
    await world.gate.pass_on(6)
    await world.add("long", LONG[:300], 3, "three")
    world.gate.open()
    for label, ask in (asks | {"long": (LONG[:300], 3, "three")}).items():
        assert await world.tokens(label) == alone(*ask)
    requests = [{_label(s.request_id): s for s in step.requests} for step in world.gate.steps]
    during = [scheduled for scheduled in requests if "long" in scheduled]
    counts = [len(scheduled["long"].token_ids) for scheduled in during]
    assert counts == [chunk] * (300 // chunk) + [300 % chunk] * (300 % chunk > 0) + [1, 1]
    assert all(scheduled[label].samples for scheduled in during for label in asks)


# Deadlines and limits.


@pytest.mark.parametrize("scheduling_policy", POLICIES)
@pytest.mark.engine("scheduling_policy")
async def test_a_timeout_in_mid_stream_ends_one_request(world: World, alone, scheduling_policy: str) -> None:
    await world.hold("one")
    await world.add("late", LONG[:20], 50, "one", timeout_s=10.0)
    await world.add("calm", LONG[20:40], 30, "one", timeout_s=1000.0)
    await world.add("base", LONG[40:60], 30)
    await world.gate.pass_on(6)
    world.clock.now += 11.0
    await world.gate.pass_on(2)
    assert {_label(rid) for rid in world.engine._engine._memory.kv.holders()} == {"calm", "base"}
    world.gate.open()
    said = [token for _ in range(6) for token in (await anext(world.streams["late"])).token_ids]
    assert said == alone(LONG[:20], 50, "one")[:6]
    with pytest.raises(RequestTimeout, match="timeout_s of 10"):
        await anext(world.streams["late"])
    assert await world.tokens("calm") == alone(LONG[20:40], 30, "one")
    assert await world.tokens("base") == alone(LONG[40:60], 30)
    assert world.engine.metrics.stats().requests_finished_total == {"length": 3, "timeout": 1}


async def test_a_rate_pauses_and_resumes_an_adapter_and_no_other(world: World, alone) -> None:
    await world.engine.set_limits("slow", Limits(tokens_per_s=10.0))
    await world.hold("one", "two")
    await world.add("other", LONG[:10], 60, "two")
    await world.add("slow", LONG[:45], 20, "one", who="slow")
    await world.gate.pass_on(12)
    slow = [("slow" in names) for names in world.gate.named(1)]
    assert slow == [True] + [False] * 10, "45 tokens less a burst of 20: 25 of debt"
    assert all("other" in names for names in world.gate.named(1))
    world.clock.now += 3.0
    seen = len(world.gate.steps)
    await world.gate.pass_on(12)
    assert [("slow" in names) for names in world.gate.named(seen)] == [False] + [True] * 6 + [False] * 5
    world.gate.open()
    assert await world.tokens("other") == alone(LONG[:10], 60, "two")
    await world.engine.set_limits("slow", None)
    assert await world.tokens("slow") == alone(LONG[:45], 20, "one")
    assert world.engine.metrics.stats().preemptions_total == 0


async def test_limits_that_change_while_serving(world: World, alone) -> None:
    async def limit(**limits: int) -> asyncio.Future[None]:
        changing = asyncio.ensure_future(world.engine.set_limits("p", Limits(**limits)))
        await asyncio.sleep(0)
        return changing

    await world.hold("one")
    for i in range(4):
        await world.add(f"p {i}", LONG[i : i + 16], 16, "one", who="p")
    limiting = await limit(max_running=1, max_queued=4)
    for i in (4, 5):
        await world.add(f"p {i}", LONG[4:20], 16, "one", who="p")
    await world.add("base", LONG[:16], 20)
    await world.gate.pass_on(10)
    await limiting
    with pytest.raises(LimitExceeded, match="'p' has 4 requests waiting"):
        await world.tokens("p 5")
    assert world.gate.named(1) == [["p 0", "base"]] * 9
    more = await limit(max_running=3)
    await world.gate.pass_on(3)
    await more
    assert world.gate.named(12) == [["p 0", "base", "p 1", "p 2"]]
    tiny = await limit(resident_bytes=1)
    world.gate.open()
    await tiny
    for i in (3, 4):
        with pytest.raises(InvalidRequest, match="may hold 1"):
            await world.tokens(f"p {i}")
    for i in range(3):
        assert await world.tokens(f"p {i}") == alone(LONG[i : i + 16], 16, "one"), "running requests go on"
    assert await world.tokens("base") == alone(LONG[:16], 20)


# Aborts.


@pytest.mark.engine(enable_prefix_caching=True, max_num_batched_tokens=32, max_num_seqs=12)
async def test_an_aborted_request_is_in_no_further_step(world: World) -> None:
    """Decoding, prefilling, between choices, as beams, queued, and waiting for an adapter; one request goes on."""
    engine = world.engine
    await world.hold("one")
    await world.add("stays", LONG[:5], 60)
    await world.add("decodes", LONG[5:10], 60, "one")
    leaving = [world.streams["decodes"]]
    leaving += await engine.add_choices(LONG[10:15], _greedy(60), 3, request_id="chooses")
    leaving += await engine.add_choices(
        LONG[15:20], _greedy(60), 1, RequestOptions(beams=BeamOptions(3)), request_id="beams"
    )
    await world.gate.pass_on(4)
    leaving.append(await world.add("prefills", LONG, 5))
    leaving.append(await world.add("loads", LONG[:9], 5, "two"))
    leaving += [await world.add(f"waits {i}", LONG[:9], 5) for i in range(12)]
    await world.gate.pass_on(3)

    requests = world.requests()
    assert 0 < requests["prefills"].num_computed_tokens < len(LONG)
    assert requests["waits 11"].status is RequestStatus.WAITING
    begun = set(itertools.chain(*world.gate.named()))
    assert {"stays", "decodes", "chooses", "beams", "prefills"} <= begun
    assert "waits 11" not in begun
    assert engine.queue_limiter.num_queued() > 0

    for stream in leaving:
        await stream.aclose()
    seen = len(world.gate.steps)
    await world.gate.pass_on(4)
    # The one that had been planned; then none.
    assert len(set(world.gate.named(seen)[0])) > 1
    assert world.gate.named(seen + 1) == [["stays"]] * 3
    assert list(world.requests()) == ["stays"]
    assert engine.queue_limiter.num_queued() == engine.queue_limiter.num_tokens == 0
    world.gate.open()
    assert len(await world.tokens("stays")) == 60
    assert not engine._streams


async def test_abort_of_one_that_its_rate_has_paused(world: World, alone) -> None:
    await world.engine.set_limits("slow", Limits(tokens_per_s=1.0))
    await world.hold("one")
    await world.add("other", LONG[:10], 30)
    await world.add("slow", LONG[:45], 20, "one", who="slow")
    await world.gate.pass_on(5)
    await world.streams["slow"].aclose()
    await world.gate.pass_on(2)
    assert [_label(rid) for rid in world.engine._engine._memory.kv.holders()] == ["other"]
    world.gate.open()
    assert await world.tokens("other") == alone(LONG[:10], 30)
    assert len([output async for output in world.streams["slow"]]) <= 1


@pytest.mark.engine(scheduling_policy="mlfq", max_num_seqs=1)
async def test_abort_of_one_that_lost_its_slot(world: World, alone) -> None:
    await world.hold()
    await world.add("old", LONG[:16], 60, priority=1)
    await world.gate.pass_on(8)
    await world.add("new", LONG[16:32], 12)
    await world.gate.pass_on(4)
    assert world.gate.named()[-1] == ["new"]
    await world.streams["old"].aclose()
    world.gate.open()
    assert await world.tokens("new") == alone(LONG[16:32], 12)


@pytest.mark.engine(preemption_mode="swap", pages=8)
async def test_one_whose_pages_cannot_be_swapped_in(world: World, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one that is left, too: nobody else brings the step in which it is computed again."""
    expect_short_answers(world.scheduler.predictor)
    executor, failed = world.engine._engine._executor, list[SwapIn]()
    apply = executor.apply_page_ops

    def apply_or_fail(ops: Sequence[PageOp]) -> int:
        failed.extend(op for op in ops if isinstance(op, SwapIn))
        if failed and failed[-1] in ops:
            raise MemoryError("no memory for the pages")
        return apply(ops)

    monkeypatch.setattr(executor, "apply_page_ops", apply_or_fail)
    await world.hold()
    for i in range(2):
        await world.add(f"r{i}", LONG[i : i + 30], 60)
    world.gate.open()
    for i in range(2):
        assert await world.tokens(f"r{i}") == alone(LONG[i : i + 30], 60)
    assert failed


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.engine("preemption_mode", pages=8)
async def test_abort_of_one_that_lost_its_pages(world: World, alone, preemption_mode: str) -> None:
    expect_short_answers(world.scheduler.predictor)
    await world.hold()
    for i in range(2):
        await world.add(f"r{i}", LONG[i : i + 30], 60)
    while not world.scheduler.counters.preemptions:
        await world.gate.pass_on()
    assert world.requests()["r1"].status is RequestStatus.PREEMPTED
    assert (world.engine._engine._memory.swap.nbytes > 0) == (preemption_mode == "swap")
    await world.streams["r1"].aclose()
    world.gate.open()
    assert await world.tokens("r0") == alone(LONG[:30], 60)
    assert world.engine.metrics.stats().swap_bytes == 0
