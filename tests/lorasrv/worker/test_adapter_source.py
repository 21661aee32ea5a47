"""The door to store and host cache: layouts are found once, alike ones are one, damage is quarantined."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import client

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.worker.adapter_source import HostAdapterStore


def test_adapters_of_the_same_ranks_share_a_layout(
    store: AdapterStore, model: Path, adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HostAdapterStore(store, HostCache(1 << 20), read_model_shape(str(model)).spec, torch.float32)
    keys = [store.resolve("one").key]
    config = json.loads((adapter_dirs["one"] / "adapter_config.json").read_text())
    digest = store.add_blob(adapter_dirs["one"] / "adapter_model.safetensors")
    for alpha in (1, 2, 3):
        keys.append(store.register(f"alpha-{alpha}", {**config, "lora_alpha": alpha}, digest).ref.key)
    assert len(set(keys)) == 4
    assert not any(source.knows_layout(key) for key in keys)
    read, spec = [], store.spec

    def counted(key: AdapterKey) -> AdapterSpec:
        read.append(key)
        return spec(key)

    monkeypatch.setattr(store, "spec", counted)
    layouts = [source.layout(key) for key in [*keys, *keys]]
    assert read == keys
    assert all(layout is layouts[0] for layout in layouts)
    assert source.layout(store.resolve("two").key) != layouts[0]
    assert all(source.knows_layout(key) for key in keys)


# A flipped bit on the disk, seen through the application around a real engine.


def damage(folder: Path, digest: str) -> bytes:
    """Flip a bit of a stored file; returns what it was."""
    blob = folder / "blobs" / "sha256" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    return whole


def test_a_damaged_adapter_fails_at_once_says_so_and_is_repaired(
    model: Path, store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = store.resolve("two").key
    digest = store.spec(key).weights_digest
    whole = damage(tmp_path / "store", digest)
    opened: list[str] = []
    open_blob = store._blobs.open
    monkeypatch.setattr(store._blobs, "open", lambda name: opened.append(name) or open_blob(name))

    async def scenario() -> None:
        async with client(model, store) as (_, http):

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
def test_whoever_meets_the_damage_first_is_told(model: Path, store: AdapterStore, tmp_path: Path, call: str) -> None:
    damage(tmp_path / "store", store.spec(store.resolve("two").key).weights_digest)

    async def scenario() -> None:
        async with client(model, store) as (_, http):
            refused = await http.post(f"/v1/adapters/two:{call}", json={})
            assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
            assert refused.json()["error"]["code"] == "adapter_corrupt"
            assert (await http.get("/v1/adapters/two")).json()["corrupt"]

    asyncio.run(scenario())
