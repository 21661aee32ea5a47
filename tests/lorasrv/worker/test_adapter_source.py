"""The door to store and host cache: layouts are found once, alike ones are one, damage is quarantined."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from following import NearOrigin
from hand_decoder import float_weights
from tiny_engine import client

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.worker.adapter_source import HostAdapterStore


def test_adapters_of_the_same_ranks_share_a_layout(
    store: AdapterStore, model: Path, adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HostAdapterStore(store, HostCache(1 << 20), float_weights(model), torch.float32)
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


def test_a_followers_adapters_come_from_its_registry(store: AdapterStore, model: Path, tmp_path: Path) -> None:
    origin = NearOrigin(lambda: store)
    with AdapterStore(tmp_path / "follower", store.base, origin=origin) as follower:
        source = HostAdapterStore(follower, HostCache(1 << 20), float_weights(model), torch.float32)
        assert source.place == f"the registry at {origin.address} or the disk"


# A flipped bit on the disk, seen through the application around a real engine.


def corrupt(answer: Any) -> str:
    """What a refusal of a damaged adapter says."""
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert answer.json()["error"]["code"] == "adapter_corrupt"
    return str(answer.json()["error"]["message"])


def damage(folder: Path, digest: str) -> bytes:
    """Flip a bit of a stored file; returns what it was."""
    blob = folder / "blobs" / "sha256" / digest
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    return whole


async def test_a_damaged_adapter_fails_at_once_says_so_and_is_repaired(
    model: Path, store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = store.resolve("two").key
    digest = store.spec(key).weights_digest
    whole, opened, open_blob = damage(tmp_path / "store", digest), [], store._blobs.open
    monkeypatch.setattr(store._blobs, "open", lambda name: opened.append(name) or open_blob(name))
    async with client(model, store) as (_, http):

        async def ask(name: str, **fields: Any) -> Any:
            body = {"model": name, "prompt": [10, 11, 12], "max_tokens": 3, "temperature": 0, **fields}
            return await http.post("/v1/completions", json=body)

        async def quarantined() -> float:
            text = (await http.get("/metrics")).text
            [line] = [line for line in text.splitlines() if line.startswith("lorasrv_adapters_quarantined ")]
            return float(line.rpartition(" ")[2])

        assert await quarantined() == 0
        with caplog.at_level(logging.ERROR):
            assert "damaged" in corrupt(await ask("two"))
        [line] = [message for message in caplog.messages if "quarantine" in message]
        assert key[:12] in line
        reads = len(opened)
        for fields in ({}, {"stream": True}, {"on_cold": "reject"}):
            assert "upload the same file again" in corrupt(await ask("two", **fields))
        for call in ("warm", "verify"):
            corrupt(await http.post(f"/v1/adapters/two:{call}", json={}))
        assert len(opened) == reads, "the disk was asked again"
        assert await quarantined() == 1
        marked = {a["id"]: a["corrupt"] for a in (await http.get("/v1/adapters")).json()["data"]}
        assert marked == {"one": False, "two": True, "three": False}
        assert (await http.get("/v1/adapters/two")).json()["versions"][0]["corrupt"]
        assert [(await ask(name)).status_code for name in ("one", "three")] == [200, 200]
        assert (await http.put(f"/v1/blobs/sha256:{digest}", content=whole)).status_code == 200
        assert (await ask("two")).status_code == 200
        assert await quarantined() == 0
        assert not (await http.get("/v1/adapters/two")).json()["corrupt"]


@pytest.mark.parametrize("call", ["warm", "verify"])
async def test_the_first_request_that_meets_the_damage_is_told(
    model: Path, store: AdapterStore, tmp_path: Path, call: str
) -> None:
    damage(tmp_path / "store", store.spec(store.resolve("two").key).weights_digest)
    async with client(model, store) as (_, http):
        corrupt(await http.post(f"/v1/adapters/two:{call}", json={}))
        assert (await http.get("/v1/adapters/two")).json()["corrupt"]
