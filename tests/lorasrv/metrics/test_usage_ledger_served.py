"""The ledger and /metrics around a real engine: compute adds up with steps, bytes with layouts, a restart keeps it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.async_engine import AsyncEngine


@contextlib.asynccontextmanager
async def served(model: Path, store: AdapterStore) -> AsyncIterator[tuple[AsyncEngine, httpx2.AsyncClient]]:
    """A real engine, and a client of the application around it."""
    options = ModelOptions(model=str(model), quantization="none", dtype="float32", kernels="torch")
    engine = AsyncEngine.build(EngineConfig(model=options, memory=MemoryOptions(pool_bytes=4 << 20)), store)
    app = create_app(engine, store, ServerSettings())
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        yield engine, http


async def ask(http: httpx2.AsyncClient, name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": list(range(10, 40)), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


async def stats(http: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await http.get(f"/v1/adapters/{name}/stats")).json()
    return shown


async def metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_everything_adds_up_and_is_kept(model: Path, store: AdapterStore) -> None:
    kept: dict[str, Any] = {}

    async def first() -> None:
        async with served(model, store) as (engine, http):
            base = (await http.get("/v1/models")).json()["data"][0]["id"]
            one, again, two, plain = (
                await ask(http, "one"),
                await ask(http, "one", n=2),
                await ask(http, "two"),
                await ask(http, base),
            )
            shown = {name: await stats(http, name) for name in ("one", "two", "three", "base")}
            by_name, steps = await metrics(http), engine.step_stats.step_seconds
            layout = engine.input_processor.layout(store.resolve("one").key)
            kept.update(await stats(http, "one"))

        assert (shown["one"]["requests"], shown["two"]["requests"], shown["base"]["requests"]) == (3, 1, 1)
        tokens = one["completion_tokens"] + again["completion_tokens"]
        assert shown["one"]["generated_tokens"] == tokens == 18
        assert shown["two"]["generated_tokens"] == two["completion_tokens"]
        assert shown["base"]["prompt_tokens"] == plain["prompt_tokens"]
        assert shown["one"]["cached_tokens"] > 0, "the second request and its second choice share the first's pages"
        computed = sum(each["compute_seconds"] for each in shown.values())
        assert computed == pytest.approx(steps.sum, abs=1e-4), "every step's time is somebody's"
        assert shown["one"]["compute_seconds"] > shown["two"]["compute_seconds"] > 0
        assert (shown["one"]["disk_loads"], shown["one"]["pool_copies"]) == (1, 1)
        assert shown["one"]["disk_bytes"] == shown["one"]["pool_bytes"] == layout.nbytes
        assert shown["one"]["found"] == {"resident": 2, "host": 0, "disk": 1}
        assert (shown["one"]["ttft"]["cold"]["count"], shown["one"]["ttft"]["hot"]["count"]) == (1, 2)
        assert kept["resident_byte_hours"] >= shown["one"]["resident_byte_hours"] >= 0
        assert shown["three"]["requests"] == shown["three"]["disk_bytes"] == shown["three"]["compute_seconds"] == 0

        assert by_name["lorasrv_step_seconds_count"] == by_name["lorasrv_steps_total"] == steps.count
        assert by_name['lorasrv_adapter_requests_total{adapter="one"}'] == 3
        assert by_name['lorasrv_adapter_load_seconds_count{tier="disk"}'] == 2
        assert by_name['lorasrv_adapter_load_seconds_count{tier="host"}'] == 2
        assert by_name['lorasrv_adapters_resident{tier="pool"}'] == 2
        assert by_name['lorasrv_adapters_resident{tier="host"}'] == 2
        assert by_name["lorasrv_batch_distinct_adapters_sum"] < by_name["lorasrv_batch_distinct_adapters_count"]
        assert by_name["lorasrv_time_to_first_token_seconds_count"] == 5
        assert by_name["lorasrv_kv_cache_usage_ratio"] == by_name["lorasrv_tokens_waiting"] == 0

    async def second() -> None:
        async with served(model, store) as (_, http):
            figures = ("requests", "generated_tokens", "compute_seconds", "disk_bytes", "found", "ttft", "last_used")
            after = await stats(http, "one")
            assert {name: after[name] for name in figures} == {name: kept[name] for name in figures}
            await ask(http, "one")
            assert (await stats(http, "one"))["requests"] == 4

    asyncio.run(first())
    asyncio.run(second())
