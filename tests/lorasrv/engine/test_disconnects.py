"""Whoever leaves is in no further step, whatever the engine does for him then: step by step on a tiny model."""

import asyncio
from pathlib import Path

from stepwise import Clock, Gate, World, name_of

from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.request import RequestStatus
from lorasrv.sampling_params import BeamOptions, SamplingParams

TOKENS_A_STEP = 32
LONG = [20 + i % 300 for i in range(400)]


def test_whoever_leaves_is_in_no_further_step(model: Path, store: AdapterStore) -> None:
    """Decoding, prefilling, between choices, as beams, queued, and waiting for an adapter; one request goes on."""
    config = EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=4 << 20),
        scheduler=SchedulerOptions(target_itl_ms=None, max_num_batched_tokens=TOKENS_A_STEP, max_num_seqs=12),
    )

    async def scenario(world: World) -> None:
        engine = world.engine
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        await world.warm("one")
        await world.hold()
        await world.add("stays", LONG[:5], 60)
        await world.add("decodes", LONG[5:10], 60, "one")
        leaving = [world.streams["decodes"]]
        leaving += await engine.add_choices(LONG[10:15], sampling, 3, request_id="chooses")
        leaving += await engine.add_choices(LONG[15:20], sampling, 1, request_id="beams", beams=BeamOptions(3))
        await world.gate.pass_on(4)
        leaving.append(await world.add("prefills", LONG, 5))
        leaving.append(await world.add("loads", LONG[:9], 5, "two"))
        leaving += [await world.add(f"waits {i}", LONG[:9], 5) for i in range(12)]
        await world.gate.pass_on(3)

        requests = {name_of(r.request_id): r for r in world.scheduler.requests()}
        assert 0 < requests["prefills"].num_computed_tokens < len(LONG)
        assert requests["waits 11"].status is RequestStatus.WAITING
        begun = {name for step in world.gate.named() for name in step}
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
        assert [name_of(r.request_id) for r in world.scheduler.requests()] == ["stays"]
        assert engine.queue_limiter.num_queued() == engine.queue_limiter.num_tokens == 0
        world.gate.open()
        assert len(await world.tokens("stays")) == 60

    async def main() -> None:
        engine = AsyncEngine.build(config, store)
        world = World(engine, Gate(engine._engine._parts.executor.runner), Clock(), store)
        await engine.start()
        try:
            await scenario(world)
            await engine.pool_map()
        finally:
            world.gate.open()
            await engine.shutdown()
        assert not engine._streams
        engine._engine.check_integrity()
        assert engine._engine._memory.num_kv_pages == 0

    asyncio.run(asyncio.wait_for(main(), 60))
