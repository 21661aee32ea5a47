"""The requests of a deleted adapter, on the real engine."""

import asyncio
from dataclasses import replace

import pytest
from tiny_engine import GREEDY, PATIENCE_S, PROMPT, collect, tokens

from lorasrv.config import NO_SHARE
from lorasrv.errors import AdapterDeleted, EngineOverloaded
from lorasrv.request import RequestOptions

LONG = replace(GREEDY, max_tokens=400)


@pytest.mark.engine(dies=True)
async def test_waiting_ends_with_the_last_choice(engine, keys) -> None:
    key, until_unused = keys["one"], engine.in_flight.until_unused
    streams = await engine.add_choices(
        PROMPT, GREEDY, 3, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)]
    )
    # The same version of another name, another version of the name with the same content, and the base.
    for adapter, name, version in ((key, "uno", 1), (key, "one", 2), (None, "", 0)):
        await engine.add(PROMPT, LONG, RequestOptions(adapter_key=adapter, adapter_id=name), versions=[(name, version)])
    assert await until_unused("one", [1], 0.0) == 1
    assert await until_unused("one", [1], PATIENCE_S) == 0
    for stream in streams:
        assert await asyncio.wait_for(collect(stream), PATIENCE_S)
    assert await until_unused("uno", [1], 0.0) == 1
    await engine.shutdown()
    assert await until_unused("uno", [1], 0.0) == 0


async def test_aborted_requests_say_why_and_free_their_pages(engine, keys) -> None:
    key = keys["one"]
    runs = await engine.add(PROMPT, LONG, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)])
    another = await engine.add(PROMPT, GREEDY, RequestOptions(adapter_key=key, adapter_id="uno"), versions=[("uno", 1)])
    await anext(runs)
    waits = await engine.add(PROMPT, LONG, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)])
    assert engine.in_flight.abort_adapter("one", [1]) == 2
    for stream in (runs, waits):
        with pytest.raises(AdapterDeleted, match="'one' was deleted"):
            await collect(stream)
    assert await collect(another)
    assert await engine.in_flight.until_unused("uno", [1], PATIENCE_S) == 0


async def test_only_requests_without_an_output_are_refused(engine, keys) -> None:
    key, error = keys["one"], EngineOverloaded("none of the adapter's limits is this server's", retry_after_s=1.0)
    runs = await engine.add(PROMPT, LONG, RequestOptions(adapter_key=key, adapter_id="one"), versions=[("one", 1)])
    first = await anext(runs)
    await engine.set_share("one", NO_SHARE)
    waits, other = [
        await engine.add(PROMPT, GREEDY, RequestOptions(adapter_key=key, adapter_id=name), versions=[(name, 1)])
        for name in ("one", "uno")
    ]
    assert engine.in_flight.abort_unanswered("one", error) == 1
    with pytest.raises(EngineOverloaded, match="none of"):
        await collect(waits)
    assert len(tokens([first, *await collect(runs)])) == LONG.max_tokens
    assert await collect(other)


async def test_a_request_that_is_being_admitted_is_aborted_too(engine, keys, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, admit = asyncio.get_running_loop(), engine.input_processor.processor.process_choices

    async def abort() -> None:
        assert engine.in_flight.abort_adapter("one", [1]) == 1

    def slow(*args: object, **options: object) -> object:
        asyncio.run_coroutine_threadsafe(abort(), loop).result()
        return admit(*args, **options)

    monkeypatch.setattr(engine.input_processor.processor, "process_choices", slow)
    with pytest.raises(AdapterDeleted):
        await engine.add(
            PROMPT, GREEDY, RequestOptions(adapter_key=keys["one"], adapter_id="one"), versions=[("one", 1)]
        )
    assert await engine.in_flight.until_unused("one", [1], 0.0) == 0
