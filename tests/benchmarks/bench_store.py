"""Measure what thousands of registered ids cost the store and the routes that list them, beside a few.

    python tests/benchmarks/bench_store.py [--adapters 5000] [--quick]

Two stores of small adapters (4 modules, 3 KB each, all different) are filled in a temporary folder, which is timed too
(each registration makes its weights and its row durable, so it is the disk's time). Then, store beside store: opening,
resolving ids, versions and unknown names, listing, and the routes over HTTP on loopback, served by the real application
around an engine that does nothing, in a process of its own. Times are medians and 99th percentiles in milliseconds;
over HTTP until the last byte, without parsing (Python takes longer to read the JSON of 5,000 models than the server to
send it).
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from harness import (
    arguments,
    environment,
    machine_line,
    open_store,
    put_blob,
    quantile,
    row,
    seeded_weights,
    table,
)

from adapter_store.registry.records import Change
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from api.server import bind
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepStats

FEW = 16
BASE = "bench-base"
RANK = 8
MODULES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16)}
SHAPES = BaseShapes(family="llama", num_layers=2, modules=MODULES, name=BASE)
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
PAGE = 100


def name_of(number: int) -> str:
    """Return an id."""
    return f"persona-{number:05d}"


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each of so many calls, after one that does not count."""
    call()
    return [timed_once(call) for _ in range(count)]


def timed_once(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    begun = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begun)


class IdleEngine:
    """Has as much of an engine as listing needs."""

    def __init__(self) -> None:
        self.model_name, self.quantization, self.max_model_len = BASE, "none", 2048
        self.metrics = EngineMetrics(EngineStats())
        self.spec = SimpleNamespace(vocab_size=256)
        self.request_stats, self.step_stats, self.heartbeat = RequestStats(), StepStats(), Heartbeat()
        self.observers = self.request_stats
        self.error: str | None = None
        self.is_alive = True

    async def start(self) -> None:
        """Nothing to start."""

    async def shutdown(self) -> None:
        """Nothing to end."""

    async def residents(self) -> list[Any]:
        """Nothing is in a pool."""
        return []


def serve(root: Path) -> None:
    """Serve the store until stdin ends. Each line of stdin is an id to change; a line on stdout confirms it."""
    with open_store(root, SHAPES) as store:
        app = create_app(cast("Any", IdleEngine()), store, ServerSettings())
        listener = bind("127.0.0.1", 0)  # asyncio sends small answers at once only on sockets whose protocol is named
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        print(listener.getsockname()[1], flush=True)
        for number, line in enumerate(sys.stdin):
            store.change(line.strip(), Change(aliases={"bench": None if number % 2 else 1}))
            print("changed", flush=True)
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Served:
    """A server in a process of its own, and one connection to it."""

    process: "subprocess.Popen[str]"
    connection: HTTPConnection

    def get(self, path: str) -> None:
        self.connection.request("GET", path)
        response = self.connection.getresponse()
        content = response.read()
        assert response.status == 200, content

    def change(self, adapter_id: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{adapter_id}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "changed\n"


@contextmanager
def served(root: Path) -> Iterator[Served]:
    """Run this script as a server of the store."""
    command, pipe = [sys.executable, __file__, "--serve", str(root)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        assert process.stdout is not None
        connection = HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=60)
        try:
            yield Served(process, connection)
        finally:
            connection.close()
            assert process.stdin is not None
            process.stdin.close()


def fill(store: AdapterStore, count: int) -> dict[str, list[float]]:
    """Time each upload and each registration."""
    uploads, registrations = [], []
    for number in range(count):
        data, begun = seeded_weights(SHAPES, number, RANK, MODULES), time.perf_counter()
        digest = put_blob(store, data)
        uploads.append(1e3 * (time.perf_counter() - begun))
        registrations.append(timed_once(partial(store.register, name_of(number), CONFIG, digest)))
    return {"upload 3 KB, durable": uploads, "register, durable": registrations}


def in_memory(store: AdapterStore, ids: int, calls: int) -> dict[str, list[float]]:
    """Time what needs no HTTP."""
    middle = name_of(ids // 2)
    key = store.resolve(middle).key

    def unknown() -> None:
        with suppress(LookupError):
            store.resolve("personna-00007")

    return {
        "resolve an id": timed(lambda: store.resolve(middle), calls),
        "resolve id@1": timed(lambda: store.resolve(f"{middle}@1"), calls),
        "resolve id@sha256:...": timed(lambda: store.resolve(f"{middle}@sha256:{key[:12]}"), calls),
        "resolve an unknown name, with near names": timed(unknown, calls // 10),
        "list all, in the store": timed(store.list_adapters, calls // 10),
    }


def new_versions(store: AdapterStore, calls: int) -> dict[str, list[float]]:
    """Time another version of an id while all ids are registered, and the same content again."""
    results: dict[str, list[float]] = {"register a new version": [], "register the same again": []}
    for number in range(calls):
        digest = put_blob(store, seeded_weights(SHAPES, 10**6 + number, RANK, MODULES))
        for times in results.values():
            times.append(timed_once(partial(store.register, name_of(3), CONFIG, digest)))
    return results


def over_http(root: Path, ids: int, calls: int) -> dict[str, list[float]]:
    """Time the routes."""
    middle = name_of(ids // 2)
    paths = {
        f"GET /v1/adapters?limit={PAGE}": f"/v1/adapters?limit={PAGE}",
        f"the page in the middle, {PAGE} ids": f"/v1/adapters?limit={PAGE}&after={middle}",
        "?search= for one id": f"/v1/adapters?search={middle[-4:]}&limit={PAGE}",
        f"GET /v1/models?limit={PAGE}": f"/v1/models?limit={PAGE}",
        "GET /v1/adapters, all": "/v1/adapters",
        "GET /v1/models, all": "/v1/models",
        "GET /v1/models/{id}": f"/v1/models/{middle}",
        "GET /health, for comparison": "/health",
    }
    with served(root) as server:
        results = {title: timed(partial(server.get, path), calls) for title, path in paths.items()}
        after_a_change = []
        for _ in range(calls):
            server.change(middle)
            after_a_change.append(timed_once(partial(server.get, "/v1/models")))
        return results | {"GET /v1/models, all, after a change": after_a_change}


def measured(root: Path, ids: int, calls: int) -> dict[str, list[float]]:
    """Fill a store and time everything with it."""
    with open_store(root, SHAPES) as store:
        results = fill(store, ids)
    results["open the store"] = timed(lambda: open_store(root, SHAPES).close(), 5)
    with open_store(root, SHAPES) as store:
        results |= in_memory(store, ids, 20 * calls)
        results |= new_versions(store, min(calls, 40))
    return results | over_http(root, ids, calls)


def main() -> None:
    a = arguments(
        __doc__,
        quick={"adapters": 200, "calls": 20},
        adapters=(5000, "ids in the larger store"),
        calls=(200, "of each kind over HTTP; twenty times as many in memory"),
        json=(False, "medians in milliseconds, by number of ids, as one line"),
        serve=(Path, "for the other process: serve the store in this folder"),
    )
    if a.serve is not None:
        serve(a.serve)
        return
    counts = sorted({FEW, a.adapters})
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        results = {ids: measured(Path(folder) / str(ids), ids, a.calls) for ids in counts}
    if a.json:
        medians = {ids: {title: statistics.median(times) for title, times in r.items()} for ids, r in results.items()}
        print(json.dumps(medians))
        return
    print(machine_line(), flush=True)
    table(("ms, median / p99", *(f"{ids} ids" for ids in counts)))
    for title in results[counts[-1]]:
        both = [(statistics.median(results[ids][title]), quantile(results[ids][title], 0.99)) for ids in counts]
        row(title, *(f"{median:.3g} / {p99:.3g}" for median, p99 in both))


if __name__ == "__main__":
    main()
