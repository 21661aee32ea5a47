"""What thousands of registered ids cost the store and the routes that list them, beside a few.

    python tests/benchmarks/bench_store.py [--adapters 5000] [--quick]

Two stores of small adapters (4 modules, 3 KB each, all different) are filled in a temporary folder, which is timed too
(each registration makes its weights and its row durable, so it is the disk's time). Then, store beside store: opening,
resolving ids, versions and unknown names, listing, and the routes over HTTP on loopback, served by the real application
around an engine that does nothing, in a process of its own. Times are medians and 99th percentiles of so many calls, in
milliseconds; over HTTP until the last byte is there: what a client makes of the bytes is its own affair (to read the
JSON of 5,000 models takes Python longer than the server to send it).
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import uvicorn
from peer_servers import machine
from safetensors.numpy import save
from tier_common import row, table

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
MODULES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16)}
SHAPES = BaseShapes(family="llama", num_layers=2, modules=MODULES, name=BASE)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PAGE = 100


def weights(number: int) -> bytes:
    """A safetensors file of its own for each number."""
    random = np.random.default_rng(number)
    tensors = {}
    for layer in range(SHAPES.num_layers):
        for module, (n_in, n_out) in MODULES.items():
            stem = f"base_model.model.{SHAPES.layer_prefix}{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = random.standard_normal((4, n_in)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.standard_normal((n_out, 4)).astype(np.float32)
    return save(tensors)


def name_of(number: int) -> str:
    return f"persona-{number:05d}"


def fill(store: AdapterStore, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each upload, and of each registration."""
    uploads, registrations = [], []
    for number in range(count):
        data = weights(number)
        digest = hashlib.sha256(data).hexdigest()
        begun = time.perf_counter()
        with store.open_blob(digest, len(data)) as upload:
            upload.write(data)
            upload.commit()
        sent = time.perf_counter()
        store.register(name_of(number), CONFIG, digest)
        uploads.append(1e3 * (sent - begun))
        registrations.append(1e3 * (time.perf_counter() - sent))
    return uploads, registrations


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of so many calls, after one that does not count."""
    call()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def shown(times: list[float]) -> str:
    """Median and 99th percentile."""
    ordered = sorted(times)
    return f"{statistics.median(ordered):.3g} / {ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]:.3g}"


class IdleEngine:
    """As much of an engine as listing needs."""

    def __init__(self) -> None:
        self.model_name, self.quantization, self.max_model_len = BASE, "none", 2048
        self.metrics = EngineMetrics(EngineStats())
        self.spec = SimpleNamespace(vocab_size=256)
        self.traffic, self.step_stats, self.heartbeat = RequestStats(), StepStats(), Heartbeat()
        self.observers = self.traffic
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
    """Serve the store until stdin ends. Each line of that is an id to change; a line answers it."""
    with AdapterStore(root, SHAPES, reserved_ids=frozenset({BASE})) as store:
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
    command = [sys.executable, __file__, "--serve", str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        connection = HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=60)
        try:
            yield Served(process, connection)
        finally:
            connection.close()
            assert process.stdin is not None
            process.stdin.close()


def in_memory(store: AdapterStore, ids: int, calls: int) -> dict[str, list[float]]:
    middle = name_of(ids // 2)
    key = store.resolve(middle).key

    def unknown() -> None:
        try:
            store.resolve("personna-00007")
        except LookupError:
            return
        raise AssertionError

    return {
        "resolve an id": timed(lambda: store.resolve(middle), calls),
        "resolve id@1": timed(lambda: store.resolve(f"{middle}@1"), calls),
        "resolve id@sha256:...": timed(lambda: store.resolve(f"{middle}@sha256:{key[:12]}"), calls),
        "resolve an unknown name (near names)": timed(unknown, calls // 10),
        "list all, in the store": timed(store.list_adapters, calls // 10),
    }


def over_http(root: Path, ids: int, calls: int) -> dict[str, list[float]]:
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
            after_a_change += timed_once(lambda: server.get("/v1/models"))
        return results | {"GET /v1/models, all, after a change": after_a_change}


def reread(store: AdapterStore, name: str) -> None:
    """What a change of an id does beside the disk's part."""
    adapter_id = store.get(name).adapter_id
    store._names.replace(adapter_id, store._index.records(adapter_id)[adapter_id])


def changes(store: AdapterStore, ids: int, calls: int) -> dict[str, list[float]]:
    """With all ids there: another version of one, the same content again, and what of it is the dictionary alone."""
    results: dict[str, list[float]] = {"register a new version": [], "register the same again": []}
    for number in range(calls):
        digest = store_blob(store, weights(10**6 + number))
        for times in results.values():
            times += timed_once(lambda digest=digest: store.register(name_of(3), CONFIG, digest))
    results["of it, the names in memory"] = timed(lambda: reread(store, name_of(3)), calls)
    return results


def store_blob(store: AdapterStore, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    with store.open_blob(digest, len(data)) as upload:
        upload.write(data)
        upload.commit()
    return digest


def timed_once(call: Callable[[], object]) -> list[float]:
    begun = time.perf_counter()
    call()
    return [1e3 * (time.perf_counter() - begun)]


def measured(root: Path, ids: int, calls: int) -> dict[str, list[float]]:
    with AdapterStore(root, SHAPES, reserved_ids=frozenset({BASE})) as store:
        uploads, registrations = fill(store, ids)
    results = {"upload 3 KB, durable": uploads, "register, durable": registrations}

    def reopen() -> None:
        AdapterStore(root, SHAPES, reserved_ids=frozenset({BASE})).close()

    results["open the store (start-up)"] = timed(reopen, 5)
    with AdapterStore(root, SHAPES, reserved_ids=frozenset({BASE})) as store:
        results |= in_memory(store, ids, 20 * calls)
        results |= changes(store, ids, min(calls, 40))
    results |= over_http(root, ids, calls)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=5000, help="ids in the larger store")
    parser.add_argument("--calls", type=int, default=200, help="of each kind over HTTP; twenty times as many in memory")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 200 ids, few calls")
    parser.add_argument("--json", action="store_true", help="medians in milliseconds, by number of ids, as one line")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve is not None:
        serve(a.serve)
        return
    if a.quick:
        a.adapters, a.calls = 200, 20
    counts = sorted({FEW, a.adapters})
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        results = {ids: measured(Path(folder) / str(ids), ids, a.calls) for ids in counts}
    if a.json:
        medians = {ids: {title: statistics.median(times) for title, times in r.items()} for ids, r in results.items()}
        print(json.dumps(medians))
        return
    print(machine(), flush=True)
    table(("ms, median / p99", *(f"{ids} ids" for ids in counts)))
    for title in results[counts[-1]]:
        row(title, *(shown(results[ids][title]) for ids in counts))


if __name__ == "__main__":
    main()
