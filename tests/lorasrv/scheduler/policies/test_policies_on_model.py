"""Policies, limits and deadlines on a real model, step by step: who has its tokens when, and that they are the right
ones whatever happened on the way. Order and counts only: clock, costs and steps are the test's."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mispredict import expect_short_answers
from stepwise import Clock, Gate, World, collect, name_of

from adapter_store.store import AdapterStore
from lorasrv.config import POLICIES, EngineConfig, Limits, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.llm import LLM
from lorasrv.memory.cost_model import StepCosts
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.request import RequestStatus
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device import compute_alone, compute_in_parallel

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""16 tokens in all layers: 3 layers, keys and values of 2 heads of 16 in float32."""
LONG = [10 + (7 * i) % 300 for i in range(320)]
NAMES = (None, "one", "two", "three")


def _config(model: Path, pages: int = 600, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=pages * PAGE_BYTES, enable_prefix_caching=False, swap_bytes=64 * PAGE_BYTES),
        scheduler=SchedulerOptions(**{"target_itl_ms": None, **scheduler}),
    )


@pytest.fixture(scope="module")
def alone(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., list[int]]]:
    """alone(prompt, tokens, adapter): what a roomy engine says to it, one request at a time."""
    known: dict[tuple[Any, ...], list[int]] = {}
    compute_alone()
    with LLM(str(model), _config(model)) as llm:
        for name, folder in adapter_dirs.items():
            llm.add_adapter(name, folder)

        def answer(prompt: list[int], tokens: int, adapter: str | None = None) -> list[int]:
            asked = (tuple(prompt), tokens, adapter)
            if asked not in known:
                sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
                known[asked] = list(llm.generate([prompt], sampling, [adapter])[0].token_ids)
            return known[asked]

        yield answer
    compute_in_parallel()


@pytest.fixture
def serve(model: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """serve(scenario, options): runs `await scenario(world)`, then checks that nothing is held any more."""
    clock, make = Clock(), MemoryManager.make
    monkeypatch.setattr(MemoryManager, "make", lambda *args: make(*args, clock=clock))
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr("lorasrv.worker.device.ENGINE_THREADS", 1)

    def run(scenario: Callable[[World], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            engine = AsyncEngine.build(_config(model, **options), store)
            world = World(engine, Gate(engine._engine._parts.executor.runner), clock, store)
            await engine.start()
            try:
                await scenario(world)
                await engine.pool_map()
            finally:
                world.gate.open()
                await engine.shutdown()
            assert not engine._engine.has_requests
            engine._engine.check_integrity()
            assert engine._engine._memory.num_kv_pages == 0

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


# Who goes first.


@pytest.mark.parametrize(("policy", "fewest", "most"), [("fair", 0, 20), ("fcfs", 60, 60)])
def test_nine_personas_beside_a_hot_one(serve, policy: str, fewest: int, most: int) -> None:
    """How much of the hot one's backlog of 60 is through when the last of the nine, who came later, has its answer."""

    async def scenario(world: World) -> None:
        await world.warm("one", "two", "three")
        await world.hold()
        for i in range(60):
            await world.add(f"hot {i}", LONG[i : i + 16], 8, "one", who="hot")
        for turn, number in itertools.product(range(2), range(9)):
            at = 100 + 9 * turn + number
            await world.add(f"p{number} {turn}", LONG[at : at + 16], 8, NAMES[1 + number % 3], who=f"p{number}")
        world.gate.open()
        for label in list(world.streams):
            assert len(await world.tokens(label)) == (1 if label == "opener" else 8)
        shares = [share for step in world.gate.steps for share in step.scheduled]
        ends = [name_of(share.request_id).split()[0] for share in shares if share.num_generated == 7]
        last_of_nine = max(i for i, who in enumerate(ends) if who != "hot")
        assert fewest <= ends[:last_of_nine].count("hot") <= most
        assert ends.count("hot") == 60

    serve(scenario, scheduling_policy=policy, max_num_seqs=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lower_priority_number_goes_first(serve, policy: str) -> None:
    async def scenario(world: World) -> None:
        await world.warm("one", "two")
        await world.hold()
        for i, priority in enumerate((1, 1, 1, 1, 1, 1, 0, 0, -1, -1, 1, 0, -1)):
            adapter = NAMES[i % 3]
            await world.add(f"{priority} {i}", LONG[i : i + 16], 4, adapter, who=f"{i % 5}", priority=priority)
        world.gate.open()
        for label in list(world.streams):
            await world.tokens(label)
        starts = list(dict.fromkeys(name for names in world.gate.named() for name in names if name != "opener"))
        assert [int(name.split()[0]) for name in starts] == [-1] * 3 + [0] * 3 + [1] * 7

    serve(scenario, scheduling_policy=policy, max_num_seqs=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_has_begun_keeps_its_seat_but_under_mlfq(serve, alone, policy: str) -> None:
    async def scenario(world: World) -> None:
        await world.hold()
        for i in range(2):
            await world.add(f"old {i}", LONG[i : i + 20], 12, priority=1)
        await world.gate.pass_on(5)
        seen = len(world.gate.steps)
        await world.add("urgent", LONG[40:60], 5, priority=-1)
        world.gate.open()
        for label, at, count in (("old 0", 0, 12), ("old 1", 1, 12), ("urgent", 40, 5)):
            assert await world.tokens(label) == alone(LONG[at : at + 20], count)
        beside = [names for names in world.gate.named(seen) if "urgent" in names]
        first = world.gate.named(seen).index(beside[0])
        assert (first <= 1) == (policy == "mlfq")
        assert len(beside) == 5
        if policy == "mlfq":
            assert beside == [["old 0", "urgent"]] * 5, "the newer of the two has its seat back afterwards"
        assert world.engine.metrics.snapshot().preemptions_total == 0

    serve(scenario, scheduling_policy=policy, max_num_seqs=2)


# Chunks.


@pytest.mark.parametrize(
    ("target_ms", "budget", "chunk"), [(None, 512, 300), (None, 64, 60), (44.5, 512, 40), (0.001, 512, 16)]
)
def test_a_long_prompt_takes_its_chunk_and_nobody_misses_a_step(serve, alone, target_ms, budget, chunk) -> None:
    async def scenario(world: World) -> None:
        world.engine._engine._memory.costs.step.seconds_each = [0.0, 1e-3, 0.0, 0.0, 0.0]
        await world.warm("one", "two", "three")
        await world.hold()
        streams = [f"stream {i}" for i in range(4)]
        for i, label in enumerate(streams):
            await world.add(label, LONG[i : i + 10], 60, NAMES[i])
        await world.gate.pass_on(6)
        await world.add("long", LONG[:300], 3, "three")
        world.gate.open()
        assert await world.tokens("long") == alone(LONG[:300], 3, "three")
        for i, label in enumerate(streams):
            assert await world.tokens(label) == alone(LONG[i : i + 10], 60, NAMES[i])
        shares = [{name_of(s.request_id): s for s in step.scheduled} for step in world.gate.steps]
        during = [share for share in shares if "long" in share]
        counts = [len(share["long"].token_ids) for share in during]
        assert counts == [chunk] * (300 // chunk) + [300 % chunk] * (300 % chunk > 0) + [1, 1]
        assert all(share[label].samples for share in during for label in streams)

    serve(scenario, max_num_seqs=8, target_itl_ms=target_ms, max_num_batched_tokens=budget)


# The same tokens, whatever happens.


@pytest.mark.parametrize("preemption", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_says_the_same(serve, alone, policy: str, preemption: str) -> None:
    """More requests than seats, more answers than pages; under mlfq they lose seats as well."""

    async def scenario(world: World) -> None:
        expect_short_answers(world.scheduler.predictor)
        await world.warm("one", "two", "three")
        await world.hold()
        asks = {f"r{i}": (LONG[5 * i : 5 * i + 20], 20 + 9 * (i % 4), NAMES[i % 4]) for i in range(12)}
        for i, (label, ask) in enumerate(asks.items()):
            await world.add(label, *ask, priority=i % 2)
        world.gate.open()
        for label, (prompt, tokens, adapter) in asks.items():
            assert await world.tokens(label) == alone(prompt, tokens, adapter), label
        snapshot = world.engine.metrics.snapshot()
        assert snapshot.preemptions_total > 0
        assert (snapshot.swaps_total > 0) == (preemption == "swap")
        assert all(len(names) <= 4 for names in world.gate.named())

    serve(
        scenario,
        pages=20,
        scheduling_policy=policy,
        preemption_mode=preemption,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )


def test_a_newcomer_takes_the_seat_of_one_that_has_run_long(serve, alone) -> None:
    """It keeps its pages meanwhile, and goes on where it was."""

    async def scenario(world: World) -> None:
        await world.hold()
        await world.add("old", LONG[:16], 60)
        await world.gate.pass_on(40)
        seen = len(world.gate.steps)
        await world.add("new", LONG[16:32], 10)
        await world.gate.pass_on(6)
        assert world.request("old").status is RequestStatus.RUNNING, "it waits for its seat, not for its pages"
        world.gate.open()
        assert await world.tokens("new") == alone(LONG[16:32], 10)
        assert await world.tokens("old") == alone(LONG[:16], 60)
        order = [name for names in world.gate.named(seen) for name in names]
        assert order == ["old"] * order.index("new") + ["new"] * 10 + ["old"] * (len(order) - 10 - order.index("new"))
        assert order.index("new") <= 1
        assert world.engine.metrics.snapshot().preemptions_total == 0

    serve(scenario, scheduling_policy="mlfq", max_num_seqs=1)


# Deadlines.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_timeout_in_mid_stream_ends_one_and_changes_no_other(serve, alone, policy: str) -> None:
    async def scenario(world: World) -> None:
        await world.warm("one")
        await world.hold()
        await world.add("late", LONG[:20], 50, "one", timeout_s=10.0)
        await world.add("calm", LONG[20:40], 30, "one", timeout_s=1000.0)
        await world.add("base", LONG[40:60], 30)
        await world.gate.pass_on(6)
        world.clock.now += 11.0
        await world.gate.pass_on(2)
        assert world.engine._engine._memory.kv.holders().keys() == {
            world.streams[label].request_id for label in ("calm", "base")
        }
        world.gate.open()
        said = [token for _ in range(6) for token in (await anext(world.streams["late"])).token_ids]
        assert said == alone(LONG[:20], 50, "one")[:6]
        with pytest.raises(RequestTimeout, match="timeout_s of 10"):
            await anext(world.streams["late"])
        assert await world.tokens("calm") == alone(LONG[20:40], 30, "one")
        assert await world.tokens("base") == alone(LONG[40:60], 30)
        assert world.engine.metrics.snapshot().requests_finished_total == {"length": 3, "timeout": 1}

    serve(scenario, scheduling_policy=policy)


def test_a_queue_timeout_ends_those_that_never_began(serve, alone) -> None:
    async def scenario(world: World) -> None:
        await world.hold()
        await world.add("runs", LONG[:20], 30)
        await world.add("waits", LONG[20:40], 5)
        await world.gate.pass_on(4)
        world.clock.now += 3.0
        await world.add("newer", LONG[40:60], 5)
        await world.gate.pass_on(2)
        world.clock.now += 3.0
        world.gate.open()
        with pytest.raises(RequestTimeout, match="queue timeout of 5 s"):
            await world.tokens("waits")
        assert await world.tokens("runs") == alone(LONG[:20], 30), "it has begun, and may take its time"
        assert await world.tokens("newer") == alone(LONG[40:60], 5)
        assert not any("waits" in names for names in world.gate.named())

    serve(scenario, max_num_seqs=1, queue_timeout_s=5.0)


# Limits.


def test_a_rate_pauses_and_resumes_an_adapter_and_nobody_else(serve, alone) -> None:
    async def scenario(world: World) -> None:
        await world.warm("one", "two")
        await world.engine.set_limits("slow", Limits(tokens_per_s=10.0))
        await world.hold()
        await world.add("other", LONG[:10], 60, "two")
        await world.add("slow", LONG[:45], 20, "one", who="slow")
        await world.gate.pass_on(12)
        assert [("slow" in names) for names in world.gate.named(1)] == [True] + [False] * 10, (
            "45 tokens less a burst of 20: 25 of debt"
        )
        assert all("other" in names for names in world.gate.named(1))
        world.clock.now += 3.0
        seen = len(world.gate.steps)
        await world.gate.pass_on(12)
        assert [("slow" in names) for names in world.gate.named(seen)] == [False] + [True] * 6 + [False] * 5
        world.gate.open()
        assert await world.tokens("other") == alone(LONG[:10], 60, "two")
        await world.engine.set_limits("slow", None)
        assert await world.tokens("slow") == alone(LONG[:45], 20, "one")
        assert world.engine.metrics.snapshot().preemptions_total == 0

    serve(scenario)


def test_limits_that_change_while_serving(serve, alone) -> None:
    async def scenario(world: World) -> None:
        await world.warm("one")
        await world.hold()
        for i in range(4):
            await world.add(f"p {i}", LONG[i : i + 16], 16, "one", who="p")
        limiting = asyncio.ensure_future(world.engine.set_limits("p", Limits(max_running=1, max_queued=4)))
        await asyncio.sleep(0)
        for i in (4, 5):
            await world.add(f"p {i}", LONG[4:20], 16, "one", who="p")
        await world.add("base", LONG[:16], 20)
        await world.gate.pass_on(10)
        await limiting
        with pytest.raises(LimitExceeded, match="'p' has 4 requests waiting"):
            await world.tokens("p 5")
        assert world.gate.named(1) == [["p 0", "base"]] * 9
        more = asyncio.ensure_future(world.engine.set_limits("p", Limits(max_running=3)))
        await asyncio.sleep(0)
        await world.gate.pass_on(3)
        await more
        assert world.gate.named(12) == [["p 0", "base", "p 1", "p 2"]]
        tiny = asyncio.ensure_future(world.engine.set_limits("p", Limits(resident_bytes=1)))
        await asyncio.sleep(0)
        world.gate.open()
        await tiny
        for i in (3, 4):
            with pytest.raises(InvalidRequest, match="may hold 1"):
                await world.tokens(f"p {i}")
        for i in range(3):
            assert await world.tokens(f"p {i}") == alone(LONG[i : i + 16], 16, "one"), "what runs goes on"
        assert await world.tokens("base") == alone(LONG[:16], 20)

    serve(scenario)


# Aborts of those that do not run just now.


def test_abort_of_one_that_its_rate_has_paused(serve, alone) -> None:
    async def scenario(world: World) -> None:
        await world.warm("one")
        await world.engine.set_limits("slow", Limits(tokens_per_s=1.0))
        await world.hold()
        await world.add("other", LONG[:10], 30)
        await world.add("slow", LONG[:45], 20, "one", who="slow")
        await world.gate.pass_on(5)
        await world.streams["slow"].aclose()
        await world.gate.pass_on(2)
        assert [name_of(r) for r in world.engine._engine._memory.kv.holders()] == ["other"]
        world.gate.open()
        assert await world.tokens("other") == alone(LONG[:10], 30)
        assert len(await collect(world.streams["slow"])) <= 1

    serve(scenario)


def test_abort_of_one_that_lost_its_seat(serve, alone) -> None:
    async def scenario(world: World) -> None:
        await world.hold()
        await world.add("old", LONG[:16], 60, priority=1)
        await world.gate.pass_on(8)
        await world.add("new", LONG[16:32], 12)
        await world.gate.pass_on(4)
        assert world.gate.named()[-1] == ["new"]
        await world.streams["old"].aclose()
        world.gate.open()
        assert await world.tokens("new") == alone(LONG[16:32], 12)

    serve(scenario, scheduling_policy="mlfq", max_num_seqs=1)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_abort_of_one_that_lost_its_pages(serve, alone, preemption: str) -> None:
    async def scenario(world: World) -> None:
        expect_short_answers(world.scheduler.predictor)
        await world.hold()
        for i in range(2):
            await world.add(f"r{i}", LONG[i : i + 30], 60)
        while not world.scheduler.counters.preemptions:
            await world.gate.pass_on()
        assert world.request("r1").status is RequestStatus.PREEMPTED
        assert (world.engine._engine._memory.swap.nbytes > 0) == (preemption == "swap")
        await world.streams["r1"].aclose()
        world.gate.open()
        assert await world.tokens("r0") == alone(LONG[:30], 60)
        assert world.engine.metrics.snapshot().swap_bytes == 0

    serve(scenario, pages=8, preemption_mode=preemption)
