"""Admission checks the queue and the key's limits twice, and counts each refusal once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llama

from api.auth.principal import Caller, KeyLimits, Scope
from api.auth.rate_limits import RateLimiter
from api.serving.admission import AdmissionController
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import EngineOverloaded, InvalidRequest, LimitExceeded
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio
ANN = Caller("ann", frozenset({Scope.INFER}), ("*",), KeyLimits(requests_per_min=2, tokens_per_min=1000))
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


async def test_queue_and_key_are_checked_twice_and_each_refusal_counts_once(tmp_path: Path) -> None:
    """On a real engine of one request slot and one place in its queue."""
    tiny_llama.write_config(tmp_path / "tiny")
    config = EngineConfig(
        model=ModelOptions(model=str(tmp_path / "tiny"), load_format="dummy", quantization="none", kernels="torch"),
        memory=MemoryOptions(pool_bytes=4 << 20),
        scheduler=SchedulerOptions(max_num_seqs=1, max_num_queued_seqs=1),
    )
    engine = AsyncEngine.build(config)
    await engine.start()
    admission = AdmissionController(engine, RateLimiter(on_refused=engine.observers.on_refused))

    async def admit(caller: Caller, prompts: Sequence[Sequence[int]] = ([1, 2, 3],)) -> list[Any]:
        async def begin() -> Any:
            return lambda prompt: engine.add_choices(prompt, LONG, 1, RequestOptions(principal=caller.principal))

        return await admission.admit(caller, prompts, 1, begin)

    async def refused(error: type[Exception], match: str | None = None) -> None:
        with pytest.raises(error, match=match):
            await admission.check(ANN)
        with pytest.raises(error, match=match):
            await admit(ANN)

    left = lambda: admission.rate_limiter.headers(ANN)["x-ratelimit-remaining-requests"]  # noqa: E731
    streams = await admit(ANN)
    await anext(streams[0])
    assert left() == "1"
    streams += await admit(replace(ANN, principal="bob"))
    await refused(EngineOverloaded)
    assert left() == "1", "a full queue costs the key nothing"
    for stream in streams:
        await stream.aclose()
    while engine.queue_limiter.num_queued():
        await asyncio.sleep(0.01)
    await admit(ANN)
    await refused(LimitExceeded, "2 requests per minute")
    with pytest.raises(InvalidRequest, match="the request has 3 prompts"):
        await admit(ANN, [[1]] * 3)
    assert engine.request_stats.rejected == Counter(engine_overloaded=2, limit_exceeded=2, invalid_request=1)
    await engine.shutdown()
