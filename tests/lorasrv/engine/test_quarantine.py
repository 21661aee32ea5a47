"""A flipped bit on the disk, seen through the HTTP application around a real engine."""

import asyncio
import contextlib
import logging
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
async def served(model: Path, store: AdapterStore) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application around a real engine."""
    config = EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=4 << 20),
    )
    app = create_app(AsyncEngine.build(config, store), store, ServerSettings())
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        yield http


def damage(folder: Path, digest: str) -> bytes:
    """Flip a bit of a stored file; returns what it was."""
    blob = folder / "blobs" / "sha256" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    return whole


def test_it_fails_at_once_says_so_and_is_repaired(
    model: Path, store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = store.resolve("two").key
    digest = store.spec(key).weights_digest
    whole = damage(tmp_path / "store", digest)
    opened: list[str] = []
    open_blob = store._blobs.open
    monkeypatch.setattr(store._blobs, "open", lambda name: opened.append(name) or open_blob(name))

    async def scenario() -> None:
        async with served(model, store) as http:

            async def ask(name: str, **fields: Any) -> Any:
                body = {"model": name, "prompt": [10, 11, 12], "max_tokens": 3, "temperature": 0, **fields}
                return await http.post("/v1/completions", json=body)

            async def metric() -> str:
                text = (await http.get("/metrics")).text
                return next(line for line in text.splitlines() if line.startswith("lorasrv_adapters_quarantined "))

            assert (await metric()).endswith(" 0.0")
            first = await ask("two")
            assert (first.status_code, first.headers["x-should-retry"]) == (503, "false")
            assert first.json()["error"]["code"] == "adapter_corrupt"
            assert "damaged" in first.json()["error"]["message"]
            reads = len(opened)
            for fields in ({}, {"stream": True}, {"on_cold": "reject"}):
                refused = await ask("two", **fields)
                assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
                assert refused.json()["error"]["code"] == "adapter_corrupt"
                assert "upload the same file again" in refused.json()["error"]["message"]
            for call in ("warm", "verify"):
                refused = await http.post(f"/v1/adapters/two:{call}", json={})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_corrupt"), call
            assert len(opened) == reads, "the disk was asked again"
            assert (await metric()).endswith(" 1.0")
            corrupt = {a["id"]: a["corrupt"] for a in (await http.get("/v1/adapters")).json()["data"]}
            assert corrupt == {"one": False, "two": True, "three": False}
            assert (await http.get("/v1/adapters/two")).json()["versions"][0]["corrupt"]
            for name in ("one", "three"):
                assert (await ask(name)).status_code == 200
            assert (await http.put(f"/v1/blobs/sha256:{digest}", content=whole)).status_code == 200
            assert (await ask("two")).status_code == 200
            assert (await metric()).endswith(" 0.0")
            assert not (await http.get("/v1/adapters/two")).json()["corrupt"]

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    [line] = [message for message in caplog.messages if "quarantine" in message]
    assert key[:12] in line


@pytest.mark.parametrize("call", ["warm", "verify"])
def test_whoever_meets_it_first_is_told(model: Path, store: AdapterStore, tmp_path: Path, call: str) -> None:
    damage(tmp_path / "store", store.spec(store.resolve("two").key).weights_digest)

    async def scenario() -> None:
        async with served(model, store) as http:
            refused = await http.post(f"/v1/adapters/two:{call}", json={})
            assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
            assert refused.json()["error"]["code"] == "adapter_corrupt"
            assert (await http.get("/v1/adapters/two")).json()["corrupt"]

    asyncio.run(scenario())
