"""Hundreds of concurrent uploads while the real engine streams: one winner a version, nothing lost, no stream harmed.

By how much streams slow down is measured by `bench_tiers.py uploads`.
"""

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import tiny_llama
from server import server

from adapter_store.registry.index import Index
from adapter_store.spec import AdapterKey

pytestmark = pytest.mark.anyio
NUM_UPLOADS = 200
NUM_STREAMS = 4
TOKENS = 24
LOOP = "event loop"


def adapter(number: int) -> tuple[dict[str, object], bytes]:
    """A rank 1 adapter of both q projections, config and file; another number, other weights."""
    return tiny_llama.adapter(1, (number + 1).to_bytes(4, "little") * tiny_llama.HIDDEN)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A server of the real engine on a tiny model."""
    tiny_llama.write_config(tmp_path / "tiny")
    kind = {"load_format": "dummy", "quantization": "none", "dtype": "float32", "pool_bytes": "4MiB"}
    with server(tmp_path / "tiny", tmp_path / "store", **kind) as served:
        yield served


async def upload(http: httpx2.AsyncClient, name: str, number: int) -> tuple[str, int, str, str]:
    """(name, version, key, digest of the weights) as the server acknowledged them."""
    config, data = adapter(number)
    digest = hashlib.sha256(data).hexdigest()
    put = await http.put(f"/v1/blobs/sha256:{digest}", content=data)
    assert put.status_code == 201, put.text
    done = await http.post("/v1/adapters", json={"id": name, "config": config, "weights": f"sha256:{digest}"})
    assert done.status_code == 201, done.text
    return name, done.json()["version"], done.json()["digest"].removeprefix("sha256:"), digest


async def stream(http: httpx2.AsyncClient, model: str) -> int:
    """One streamed answer, to its end; returns how many tokens came."""
    body = {"model": model, "prompt": "abcdefgh", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]
    return int(chunks[-1]["usage"]["completion_tokens"])


async def _storm(url: str, names: list[str]) -> tuple[list[tuple[str, int, str, str]], int]:
    """Upload to all names at once while streams run: what was acknowledged, and how many streams ended."""
    # A connection that was idle for as long as the server keeps it may end as it is used again.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as http:
        await upload(http, "steady", 10_000)
        over = asyncio.Event()

        async def streaming(model: str) -> list[int]:
            tokens = []
            while not over.is_set():
                tokens.append(await stream(http, model))
            return tokens

        streams = [asyncio.create_task(streaming(("tiny", "steady")[n % 2])) for n in range(NUM_STREAMS)]
        try:
            done = await asyncio.gather(*(upload(http, name, number) for number, name in enumerate(names)))
        finally:
            over.set()
        tokens = [count for task in streams for count in await task]
    assert set(tokens) == {TOKENS}
    return list(done), len(tokens)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["mia"] * NUM_UPLOADS, id="one"),
        pytest.param([f"a{n}" for n in range(NUM_UPLOADS)], id="many", marks=pytest.mark.long),
    ],
)
async def test_two_hundred_concurrent_uploads(live: SimpleNamespace, names: list[str]) -> None:
    done, num_streams = await _storm(live.url, names)
    assert num_streams >= NUM_STREAMS
    for name in set(names):
        versions = sorted(version for of, version, *_ in done if of == name)
        assert versions == list(range(1, names.count(name) + 1)), "one winner a number, and no number left out"
        record = live.store.get(name)
        assert [v.version for v in record.versions] == versions
        assert record.current_version == versions[-1]
    for name, version, key, digest in done:
        assert live.store.resolve(f"{name}@{version}").key == key, "an acknowledged upload was overwritten"
        assert live.store.load(AdapterKey(key)).spec.weights_digest == digest
    assert not list((live.store.root / "tmp").iterdir())
    named = {digest for *_, digest in done} | {live.store.spec(live.store.get("steady").key).weights_digest}
    assert {path.name for path in (live.store.root / "blobs" / "sha256").iterdir()} == named


class Slow:
    """Hashing and fsync as the store does them, each call noted with its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, set[str]] = {"hash": set(), "fsync": set(), "transaction": set()}
        fsync, sha256, transaction = os.fsync, hashlib.sha256, Index._transaction

        def noting_fsync(fd: int) -> None:
            self._note("fsync")
            fsync(fd)

        def noting_sha256(data: bytes = b"", **options: Any) -> Any:
            if not sys._getframe(1).f_globals["__name__"].startswith("adapter_store"):
                return sha256(data, **options)
            if data:
                self._note("hash")
            return NotingHash(sha256(data, **options), lambda: self._note("hash"))

        def noting_transaction(index: Index) -> Any:
            self._note("transaction")
            return transaction(index)

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(hashlib, "sha256", noting_sha256)
        monkeypatch.setattr(Index, "_transaction", noting_transaction)

    def _note(self, what: str) -> None:
        self.threads[what].add(threading.current_thread().name)


class NotingHash:
    def __init__(self, hasher: Any, note: Callable[[], None]) -> None:
        self._hasher, self._note = hasher, note

    def update(self, data: Any) -> None:
        self._note()
        self._hasher.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hasher, name)


async def test_hashing_and_fsync_never_run_on_the_loop_or_the_engine(live: SimpleNamespace, monkeypatch) -> None:
    """SQLite's own fsync comes inside a transaction of the index, so those are noted, too."""
    slow = Slow(monkeypatch)
    async with httpx2.AsyncClient(base_url=live.url, trust_env=False, timeout=60) as http:
        for number in range(3):
            await upload(http, "mia", number)
        assert await stream(http, "mia") == TOKENS
        await upload(http, "zoe", 9)
        assert (await http.post("/v1/adapters/zoe:warm", json={"deadline_ms": 10_000})).json()["reached"]
        patched = await http.patch("/v1/adapters/mia", json={"limits": {"max_running": 3}})
        assert patched.status_code == 200, patched.text
        assert (await http.get("/v1/adapters")).status_code == 200
        for reference in ("mia@1", "mia", "zoe"):
            assert (await http.delete(f"/v1/adapters/{reference}")).status_code == 202
    assert all(slow.threads.values()), "nothing was noted"
    for what, threads in slow.threads.items():
        assert not threads & {LOOP, "engine", "MainThread"}, f"{what}: {threads}"
