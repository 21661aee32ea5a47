"""Small real engines on the tiny llama, alone or behind the HTTP application, and what tests do with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.llm import LLM
from lorasrv.outputs import RequestOutput
from lorasrv.sampling_params import SamplingParams

LONG = [10 + (7 * i) % 300 for i in range(60)]
PROMPT = LONG[:45]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
BLOCK = 3 * 2 * 2 * 16 * 16 * 4
"""Bytes of a page in all layers: 3 layers, keys and values of 2 heads of 16 in float32."""
PATIENCE_S = 60.0


def engine_config(
    model: Path,
    pages: int = 400,
    *,
    kernels: str = "auto",
    scheduler: SchedulerOptions | None = None,
    options: Mapping[str, Any] | None = None,
    **memory: Any,
) -> EngineConfig:
    """The tiny model as it is stored, with a pool of so many pages; `memory` and `options` are fields of the others."""
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32", kernels=kernels),
        memory=MemoryOptions(**{"pool_bytes": pages * BLOCK, **memory}),
        scheduler=scheduler or SchedulerOptions(),
        **(options or {}),
    )


@contextlib.contextmanager
def offline_engine(model: Path, adapters: Mapping[str, Path] | None = None, *args: Any, **fields: Any) -> Iterator[LLM]:
    """An `LLM` of `engine_config(model, *args, **fields)` with these PEFT folders by name."""
    with LLM(str(model), engine_config(model, *args, **fields)) as llm:
        for name, folder in (adapters or {}).items():
            llm.add_adapter(name, folder)
        yield llm


def engine(model: Path, store: AdapterStore, *args: Any, **fields: Any) -> AsyncEngine:
    """An engine of `engine_config(model, *args, **fields)` that is not started yet."""
    return AsyncEngine.build(engine_config(model, *args, **fields), store)


@contextlib.asynccontextmanager
async def client(
    model: Path, store: AdapterStore, **fields: Any
) -> AsyncIterator[tuple[AsyncEngine, httpx2.AsyncClient]]:
    """A real engine, and a client of the application around it."""
    from api.app import create_app
    from api.config.settings import ServerSettings

    served = engine(model, store, **fields)
    app = create_app(served, store, ServerSettings())
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        yield served, http


@pytest.fixture
def serve(model: Path, store: AdapterStore) -> Callable[..., None]:
    """serve(scenario, fields of `engine_config`) awaits scenario(engine) with a live engine, then checks its books."""

    def run(scenario: Callable[[AsyncEngine], Awaitable[None]], *args: Any, **fields: Any) -> None:
        async def main() -> None:
            served = engine(model, store, *args, **fields)
            await served.start()
            try:
                await scenario(served)
                assert served.is_alive
            finally:
                await served.shutdown()
            served._engine.check_integrity()

        asyncio.run(asyncio.wait_for(main(), 5 * PATIENCE_S))

    return run


@pytest.fixture(scope="module")
def alone(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., list[int]]]:
    """alone(prompt, sampling, name): what a roomy engine without prefix cache says to it, one request at a time."""
    with offline_engine(model, adapter_dirs, enable_prefix_caching=False) as llm:
        yield lambda prompt, sampling, name: list(llm.generate([prompt], sampling, [name])[0].token_ids)


async def ask(served: AsyncEngine, key: AdapterKey | None, prompt: list[int] = PROMPT, **fields: Any) -> list[Any]:
    """All outputs of a request; `sampling` is greedy unless it is given."""
    return await collect(served.generate(prompt, fields.pop("sampling", GREEDY), adapter=key, **fields))


async def collect(stream: Any) -> list[RequestOutput]:
    """The outputs of a stream."""
    return [output async for output in stream]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """The answer."""
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Waits until it is true. Raises: TimeoutError: that does not come."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
