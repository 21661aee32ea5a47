"""Small real engines on the tiny llama, alone or behind the HTTP application, and helpers for tests of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.llm import LLM
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.outputs import EngineOutput, RequestOutput
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import SamplingParams

LONG = [10 + (7 * i) % 300 for i in range(60)]
PROMPT = LONG[:45]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
BLOCK = 3 * 2 * 2 * 16 * 16 * 4
"""Bytes of a page in all layers: 3 layers, keys and values of 2 heads of 16 in float32."""
PATIENCE_S = 60.0


def engine_config(model: Path, pages: int = 400, **options: Any) -> EngineConfig:
    """Return options for the tiny model as it is stored, with a pool of `pages` pages, and other options by name."""
    known = {"model": str(model), "quantization": "none", "dtype": "float32", "pool_bytes": pages * BLOCK} | options
    # The last bits of results depend on the number of rows, which drafts change.
    known = {"speculation": "off"} | known

    def take(kind: Any) -> Any:
        return kind(**{field.name: known.pop(field.name) for field in fields(kind) if field.name in known})

    parts = {"model": take(ModelOptions), "memory": take(MemoryOptions), "scheduler": take(SchedulerOptions)}
    parts["speculation"] = take(SpeculationOptions)
    return EngineConfig(**parts | known)


@contextlib.contextmanager
def offline_engine(
    model: Path, adapters: Mapping[str, Path] | None = None, *args: Any, **options: Any
) -> Iterator[LLM]:
    """Start an `LLM` of `engine_config(model, *args, **options)` with these PEFT folders by name."""
    with LLM(str(model), engine_config(model, *args, **options)) as llm:
        for name, folder in (adapters or {}).items():
            llm.add_adapter(name, folder)
        yield llm


@contextlib.contextmanager
def checked_engine(*args: Any, **options: Any) -> Iterator[LLM]:
    """Start an `offline_engine` whose accounts are checked after every step."""
    with offline_engine(*args, **options) as llm:
        step = llm.engine.step

        def checked() -> Any:
            outputs = step()
            llm.engine.check_integrity()
            return outputs

        llm.engine.step = checked  # type: ignore[method-assign]
        yield llm


def drive(
    llm: LLM, messages: Sequence[EngineCoreRequest], before_step: Callable[[int], object] = lambda _: None
) -> list[list[EngineOutput]]:
    """Answer requests step by step; check the accounts after each step, and that only a request's last output ends it.

    Args:
        before_step: called with the step's number, from 1.
    """
    outputs: dict[str, list[EngineOutput]] = {message.request_id: [] for message in messages}
    for message in messages:
        llm.engine.add_request(message)

    def step() -> None:
        for output in llm.engine.step():
            outputs[output.request_id].append(output)
        llm.engine.check_integrity()

    number = 0
    while llm.engine.has_requests:
        number += 1
        assert number < 3000, "the engine does not get on"
        before_step(number)
        step()
    step()
    assert llm.engine._memory.kv.num_pages == 0
    assert {sum(o.finish_reason is not None for o in told) for told in outputs.values()} == {1}
    return list(outputs.values())


@contextlib.asynccontextmanager
async def client(
    model: Path, store: AdapterStore, **options: Any
) -> AsyncIterator[tuple[AsyncEngine, httpx2.AsyncClient]]:
    """Start a real engine, and a client of the application around it."""
    from api.app import create_app
    from api.config.settings import ServerSettings

    served = AsyncEngine.build(engine_config(model, **options), store)
    app = create_app(served, store, ServerSettings())
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        yield served, http


@contextlib.asynccontextmanager
async def running(served: AsyncEngine, *, dies: bool = False) -> AsyncIterator[AsyncEngine]:
    """Start an engine and shut it down; at the end, check that every request has ended and the pool's accounts add up.

    Args:
        dies: the test makes the engine die.
    """
    await served.start()
    try:
        yield served
        assert served.is_alive is not dies
        if served.is_alive:
            await idle(served)
    finally:
        await served.shutdown()
    served._engine.check_integrity()


@pytest.fixture
def observers() -> list[RequestObserver]:
    """Return the additional observers of `engine`."""
    return []


def marked_options(request: pytest.FixtureRequest, **defaults: Any) -> dict[str, Any]:
    """Return the options of a test's `engine` marker, by name; positional words name parameters of the test."""
    marker = request.node.get_closest_marker("engine") or pytest.mark.engine().mark
    return {**defaults, **{name: request.node.callspec.params[name] for name in marker.args}, **marker.kwargs}


@pytest.fixture
async def engine(
    request: pytest.FixtureRequest, model: Path, store: AdapterStore, observers: list[RequestObserver]
) -> AsyncIterator[AsyncEngine]:
    """Run an engine of the tiny model, with the options of `engine_config` in the test's marker, and `dies`."""
    options = marked_options(request, dies=False)
    dies = options.pop("dies")
    built = AsyncEngine.build(engine_config(model, **options), store, observers=observers)
    async with running(built, dies=dies):
        yield built


@pytest.fixture
def keys(store: AdapterStore) -> dict[str | None, AdapterKey | None]:
    """Return the initial keys of the stored adapters by name; None for the base."""
    return {None: None} | {name: store.resolve(name).key for name in ("one", "two", "three")}


@pytest.fixture(scope="module")
def alone(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[..., list[int]]]:
    """Yield alone(prompt, sampling, name), which returns the answer of a large engine without prefix cache to a single
    request.
    """
    with offline_engine(model, adapter_dirs, enable_prefix_caching=False) as llm:
        yield lambda prompt, sampling, name: list(llm.generate([prompt], sampling, [name])[0].token_ids)


async def ask(
    served: AsyncEngine,
    key: AdapterKey | None,
    prompt: list[int] = PROMPT,
    sampling: SamplingParams = GREEDY,
    request_id: str | None = None,
    **options: Any,
) -> list[Any]:
    """Return all outputs of a request."""
    asked = RequestOptions(adapter_key=key, **options)
    return await collect(served.generate(prompt, sampling, asked, request_id=request_id))


async def collect(stream: Any) -> list[RequestOutput]:
    """Return the outputs of a stream; check that only the last one ends it."""
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    """Return the answer."""
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not true in time.
    """
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def idle(served: AsyncEngine) -> None:
    """Wait until no request is left."""

    def holds_none() -> bool:
        shown = served.metrics.stats()
        return not shown.requests_running + shown.requests_waiting + shown.requests_waiting_for_adapter + shown.pages_kv

    await until(holds_none)
