"""Measure what thousands of registered ids cost the store and the routes that list them, beside a few.

    python tests/benchmarks/bench_store.py [--adapters 5000] [--quick]

Two stores of small adapters (4 modules, 3 KB each, all different) are filled in a temporary folder, which is timed too
(each registration makes its weights and its row durable, so it is the disk's time). Then, store beside store: opening,
resolving ids, versions and unknown names, listing, and the routes over HTTP on loopback, served by `lorasrv serve` with
an engine that does nothing (`tests/support/fake_serve.py`). Times are medians and 99th percentiles in milliseconds;
over HTTP until the last byte, without parsing (Python takes longer to read the JSON of 5,000 models than the server to
send it).
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from harness import arguments, machine_line, open_store, put_blob, quantile, row, seeded_weights, table
from adapter_keys import key_of
from fake_serve import command
from served import serve
from tiny_adapter import SHAPES

from adapter_store.store import AdapterStore

FEW = 16
RANK = 24
MODULES = ("self_attn.q_proj", "self_attn.v_proj")
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
    key = key_of(store.resolve(middle))

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
    with (
        serve("--log-level", "warning", store=root, program=command()) as server,
        closing(HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)) as connection,
    ):

        def get(path: str) -> None:
            connection.request("GET", path)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content

        results = {title: timed(partial(get, path), calls) for title, path in paths.items()}
        after_a_change = []
        for number in range(calls):
            body = {"aliases": {"bench": None if number % 2 else 1}}
            server.http.patch(f"/v1/adapters/{middle}", json=body).raise_for_status()
            after_a_change.append(timed_once(partial(get, "/v1/models")))
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
    )
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
