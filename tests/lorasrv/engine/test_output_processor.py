"""Waiting for, and ending, the requests of a deleted adapter, on the real engine."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_engine
from tiny_engine import GREEDY, PATIENCE_S, PROMPT, collect

from adapter_store.store import AdapterStore
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import AdapterDeleted

SHORT = replace(GREEDY, max_tokens=12)
LONG = replace(GREEDY, max_tokens=400)


def test_waiting_ends_with_the_last_choice(model: Path, store: AdapterStore) -> None:
    key, other = store.resolve("one").key, store.resolve("two").key

    async def scenario() -> None:
        engine = tiny_engine.engine(model, store)
        await engine.start()
        streams = await engine.add_choices(PROMPT, SHORT, 3, adapter=key, adapter_id="one")
        # The same content by another name, another content of the name, and the base.
        for adapter, name in ((key, "uno"), (other, "one"), (None, "")):
            await engine.add(PROMPT, LONG, adapter=adapter, adapter_id=name)
        assert await engine.in_flight.until_unused("one", [key], 0.0) == 1
        assert await engine.in_flight.until_unused("one", [key], PATIENCE_S) == 0
        for stream in streams:
            assert (await asyncio.wait_for(collect(stream), 0.1))[-1].finished
        assert await engine.in_flight.until_unused("uno", [key], 0.0) == 1
        await engine.shutdown()
        assert await engine.in_flight.until_unused("uno", [key], 0.0) == 0

    asyncio.run(scenario())


def test_what_is_ended_says_why_and_gives_its_pages_back(serve, store: AdapterStore) -> None:
    key = store.resolve("one").key

    async def scenario(engine: AsyncEngine) -> None:
        runs = await engine.add(PROMPT, LONG, adapter=key, adapter_id="one")
        another = await engine.add(PROMPT, SHORT, adapter=key, adapter_id="uno")
        await anext(runs)
        waits = await engine.add(PROMPT, LONG, adapter=key, adapter_id="one")
        assert engine.in_flight.abort_adapter("one", [key]) == 2
        for stream in (runs, waits):
            with pytest.raises(AdapterDeleted, match="'one' was deleted"):
                await collect(stream)
        assert len(await collect(another)) > 0
        assert await engine.in_flight.until_unused("uno", [key], PATIENCE_S) == 0
        await engine.pool_map()
        assert engine.metrics.snapshot().requests_running == 0

    serve(scenario)


def test_one_that_is_still_being_admitted_is_ended_too(
    serve, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = store.resolve("one").key

    async def scenario(engine: AsyncEngine) -> None:
        loop, admit = asyncio.get_running_loop(), engine.input_processor.process_choices

        def slow(*args: object, **options: object) -> object:
            asyncio.run_coroutine_threadsafe(end(), loop).result()
            return admit(*args, **options)  # type: ignore[arg-type]

        async def end() -> None:
            assert engine.in_flight.abort_adapter("one", [key]) == 1

        monkeypatch.setattr(engine.input_processor, "process_choices", slow)
        with pytest.raises(AdapterDeleted):
            await engine.add(PROMPT, SHORT, adapter=key, adapter_id="one")
        assert await engine.in_flight.until_unused("one", [key], 0.0) == 0

    serve(scenario)
