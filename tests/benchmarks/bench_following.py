"""Measure how fast servers that follow a registry hear of changes, take over all names, and fetch weights.

    python tests/benchmarks/bench_following.py [--followers 8] [--changes 200] [--ids 20000]

A registry (`lorasrv registry`, built-in base) has adapters of rank 16, some 10 MB each, and many ids that share a small
one. Followers are stores of their own with what a server has for following, without an engine: changes are timed from
the registry's answer until the last of them shows it. A process of its own follows from nothing until it has all names.
Weights are loaded at one follower, first from the registry, then from its own disk.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx2
from harness import (
    adapter_folders,
    arguments,
    environment,
    machine_line,
    open_store,
    put_blob,
    quantile,
    row,
    seeded_weights,
    shapes_of,
    table,
)
from adapter_keys import key_of
from served import serve

from adapter_store.registry.name_feed import Followed
from adapter_store.store import AdapterStore
from api.replication.follower import Follower
from api.replication.headers import REVISION
from api.replication.registry_client import HttpOrigin, RegistryClient

SECRET = "of-this-cluster"
ADAPTERS = 16
MODULES = ("self_attn.q_proj",)
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
PROBE = """
import sys
sys.path[:0] = {path!r}
from bench_following import followed
print(*followed({folder!r}, {url!r}))
"""


def memory_mib() -> float:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def _nothing(_: Followed) -> None:
    """Ignore what changed."""


def following(folder: Path, url: str, stack: ExitStack, name: str) -> tuple[AdapterStore, Follower]:
    """Open a store that follows."""
    origin = HttpOrigin(url, SECRET)
    folder.mkdir(exist_ok=True)
    shapes = shapes_of()
    store = stack.enter_context(AdapterStore(folder, shapes, reserved_ids=frozenset({shapes.name}), origin=origin))
    return store, Follower(store, origin, RegistryClient(origin, SECRET), name)


def followed(folder: str, url: str) -> tuple[float, float, int]:
    """Follow until all names are there; return the seconds, the memory that was taken in MiB, and their number."""

    async def follow(follower: Follower) -> None:
        await follower.start(_nothing)
        while not follower.has_lease:
            await asyncio.sleep(0.005)
        await follower.stop()
        await follower.close()

    with ExitStack() as stack:
        store, follower = following(Path(folder), url, stack, "f" * 8)
        begun, before = time.perf_counter(), memory_mib()
        asyncio.run(follow(follower))
        return time.perf_counter() - begun, memory_mib() - before, len(store.records())


def register(http: httpx2.Client, name: str, digest: str) -> int:
    """Register an id of weights that are there; return the revision."""
    answer = http.post("/v1/adapters", json={"id": name, "config": CONFIG, "weights": f"sha256:{digest}"})
    answer.raise_for_status()
    return int(answer.headers[REVISION])


async def changes_ms(
    folder: Path, url: str, number: int, followers: int, digest: str
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each change, and until the last follower shows it."""
    answers, seen = [], []
    async with AsyncExitStack() as opened:
        stack = opened.enter_context(ExitStack())
        pairs = [following(folder / f"f{n}", url, stack, f"{n:08x}") for n in range(followers)]
        for _, follower in pairs:
            await follower.start(_nothing)
            opened.push_async_callback(follower.close)
            opened.push_async_callback(follower.stop)
        http = opened.enter_context(httpx2.Client(base_url=url, trust_env=False, timeout=60))
        while not all(follower.has_lease for _, follower in pairs):
            await asyncio.sleep(0.01)
        for n in range(number):
            begun = time.perf_counter()
            revision = await asyncio.to_thread(register, http, f"changed-{n}", digest)
            answered = time.perf_counter()
            await asyncio.gather(*(follower.until_revision(revision, 60.0) for _, follower in pairs))
            answers.append(1e3 * (answered - begun))
            seen.append(1e3 * (time.perf_counter() - answered))
            await asyncio.sleep(0.02)
    return answers, seen


def loads_mb_s(store: AdapterStore, folders: Sequence[Path]) -> tuple[float, float]:
    """Return the rate at which adapters are loaded from the registry, and then from this disk, in MB/s."""
    rates = []
    for _ in range(2):
        begun, size = time.perf_counter(), 0
        for folder in folders:
            store.load(key_of(store.resolve(folder.name)))
            size += (folder / "adapter_model.safetensors").stat().st_size
        rates.append(size / 1e6 / (time.perf_counter() - begun))
    return rates[0], rates[1]


def main() -> None:
    a = arguments(
        __doc__,
        followers=(8, "that hear of each change"),
        changes=(200, "ids that are registered"),
        ids=(20_000, "names that a new follower takes over"),
    )
    print(machine_line())
    folders = adapter_folders(ADAPTERS)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as temporary, ExitStack() as stack:
        root = Path(temporary)
        with open_store(root / "registry", shapes_of()) as store:
            for folder in folders:
                config = json.loads((folder / "adapter_config.json").read_text())
                store.register(folder.name, config, store.add_blob(folder / "adapter_model.safetensors"))
            small = put_blob(store, seeded_weights(shapes_of(), 0, 1, MODULES))
            begun = time.perf_counter()
            for n in range(a.ids):
                store.register(f"id-{n:06d}", CONFIG, small)
            print(f"\n{a.ids} ids registered in {time.perf_counter() - begun:.0f} s")
        served = stack.enter_context(
            serve("--cluster-secret", SECRET, "--log-level", "warning", store=root / "registry", command="registry")
        )
        table(("what", "figure"))
        path = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
        probe = PROBE.format(path=path, folder=str(root / "new"), url=served.url)
        told = subprocess.run(
            [sys.executable, "-c", probe], check=True, capture_output=True, text=True, env=environment()
        ).stdout.split()
        row(f"a new follower has {told[2]} names: s", float(told[0]))
        row("its memory for them: MiB", float(told[1]))
        answers, seen = asyncio.run(changes_ms(root, served.url, a.changes, a.followers, small.removeprefix("sha256:")))
        row("a registration, over HTTP: ms, median", statistics.median(answers))
        for of, value in (("median", statistics.median(seen)), ("p99", quantile(seen, 0.99)), ("most", max(seen))):
            row(f"from its answer until {a.followers} followers show it: ms, {of}", value)
        reading, _ = following(root / "new", served.url, stack, "e" * 8)
        fetched, local = loads_mb_s(reading, folders)
        row(f"loading {ADAPTERS} adapters that only the registry has: MB/s", fetched)
        row("loading them again, from its own disk: MB/s", local)


if __name__ == "__main__":
    main()
