"""Provide what the benchmark scripts share: adapters, servers, loads, statistics, tables and command lines.

Importing this module puts the checkout it lies in, and `tests/support`, first on the import path.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from adapter_keys import key_of
from safetensors_bytes import tiled, with_header
from served import ROOT, serve

from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.store import AdapterStore
from api.cli.bench import load as bench_load
from api.cli.bench import machine as bench_machine
from api.cli.bench.load import Load
from api.cli.bench.prompts import WORDS, nonce
from api.client import Client
from lorasrv.config import BUILTIN_MODEL
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

ASSETS = ROOT / "build" / "bench"
PEERS = Path(__file__).parent / "peers"
PAGE_TOKENS = 16
# Keys and values of a page in all layers of the built-in base, bf16.
PAGE_BYTES = 2 * 192 * PAGE_TOKENS * 2 * 30
START = "from api.cli.main import main; main()"
START_SECONDS = 300.0

# Adapters.


def adapter_folders(count: int, assets: Path = ASSETS) -> list[Path]:
    """Return PEFT folders of `count` seeded adapters, rank 16 on all linears; make them and the base if missing."""
    if not (assets / "adapters" / f"a{max(1, count) - 1:04d}" / "adapter_config.json").exists():
        make = [sys.executable, str(PEERS / "make_assets.py"), "--out", str(assets), "--adapters", str(max(1, count))]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return sorted((assets / "adapters").iterdir())[:count]


def shapes_of(model: str = BUILTIN_MODEL) -> BaseShapes:
    """Return the shapes that adapters of a base model must have."""
    with closing(open_checkpoint(model)) as checkpoint:
        return base_shapes(checkpoint.spec, checkpoint.name)


def open_store(folder: Path, shapes: BaseShapes) -> AdapterStore:
    """Open the adapter store in `folder`, as `lorasrv serve` does."""
    folder.mkdir(parents=True, exist_ok=True)
    return AdapterStore(folder, shapes, reserved_ids=frozenset({shapes.name}))


def register_seeded(
    store: AdapterStore, names: Sequence[str], rank: int, modules: Collection[str] | None = None
) -> list[AdapterKey]:
    """Register adapters that the store does not have yet, and return the keys of all.

    Args:
        names: ids; the weights are seeded by the position, so that no two adapters are alike.
        modules: modules that get weights, as `self_attn.q_proj`; None: all of the base.
    """
    known = {str(record.adapter_id): key_of(record) for record in store.list_adapters()}
    targets = sorted(modules or store.base.modules)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config["target_modules"] = sorted({module.rpartition(".")[2] for module in targets})
    for number, name in enumerate(names):
        if name not in known:
            digest = put_blob(store, seeded_weights(store.base, number, rank, targets))
            known[name] = key_of(store.register(name, config, digest).ref)
    return [known[name] for name in names]


def seeded_weights(base: BaseShapes, number: int, rank: int, modules: Iterable[str]) -> bytes:
    """Return a bf16 safetensors file of random LoRA weights."""
    rng, shapes, parts = np.random.default_rng(number), {}, []
    for layer, module in ((layer, module) for layer in range(base.num_layers) for module in modules):
        n_in, n_out = base.modules[module]
        for matrix, shape in (("lora_A", (rank, n_in)), ("lora_B", (n_out, rank))):
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)
            parts.append((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            shapes[f"base_model.model.{base.layer_prefix}{layer}.{module}.{matrix}.weight"] = shape
    text = json.dumps(tiled(shapes, "BF16"), separators=(",", ":")).encode()
    return with_header(text + b" " * (-len(text) % 8), b"".join(parts))


def put_blob(store: AdapterStore, data: bytes) -> str:
    """Store a weights file and return its digest."""
    digest = hashlib.sha256(data).hexdigest()
    with store.open_blob(digest, len(data)) as upload:
        upload.write(data)
        upload.commit()
    return digest


# Servers and other checkouts.


@dataclass(frozen=True)
class Server:
    """A running server that has become ready."""

    url: str
    base_name: str
    start_s: float
    pid: int


@contextmanager
def lorasrv_server(store: Path, *flags: object, adapters: Sequence[Path] = (), root: Path = ROOT) -> Iterator[Server]:
    """Run `lorasrv serve` of a checkout, with PEFT folders uploaded; `start_s` does not include the uploads."""
    begun = time.perf_counter()
    with serve(*flags, store=store, root=root) as served, Client(served.url) as client:
        served.until(lambda: served.http.get("/ready").status_code == 200, START_SECONDS)
        start_s = time.perf_counter() - begun
        for folder in adapters:
            with open_adapter_dir(folder) as adapter:
                client.upload(adapter, folder.name)
        yield Server(served.url, BUILTIN_MODEL, start_s, served.pid)


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return the environment in which Python imports the packages of a checkout."""
    return {**os.environ, "PYTHONPATH": str(root)}


def lorasrv_command(*words: object) -> list[str]:
    """Return the command line of a `lorasrv` command of this checkout; run it with `environment()`."""
    return [sys.executable, "-P", "-c", START, *map(str, words)]


def run_json(*words: object) -> dict[str, Any]:
    """Run a `lorasrv` command of this checkout and return the JSON object that it prints."""
    command = lorasrv_command(*words)
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment())
    return dict(json.loads(done.stdout))


def machine_line() -> str:
    """Return one line about this machine."""
    told: dict[str, Any] = bench_machine.machine()
    instructions = " ".join(told["instructions"])
    return f"{told['cpu']}, {told['cores']} cores, {instructions}, Python {platform.python_version()}"


def versus(other: Path, pairs: int, measure: Callable[[Path], Mapping[str, float]]) -> None:
    """Measure this checkout and another one alternately and print a table of both.

    Args:
        measure: returns the figures of the checkout at a path, by name, measured in processes of their own.
    """
    runs = []
    for number in range(pairs):
        roots = (other, ROOT) if number % 2 == 0 else (ROOT, other)
        done = {root: measure(root) for root in roots}
        runs.append((done[other], done[ROOT]))
        shown = ", ".join(f"{name} {old:.4g} → {runs[-1][1][name]:.4g}" for name, old in runs[-1][0].items())
        print(f"pair {number + 1} of {pairs}: {shown}", flush=True)
    print(f"\nold: {revision(other)}; new: {revision(ROOT)}; {pairs} pairs in turn")
    table(("figure", "old, median", "new, median", "new/old, median", "min to max"), compared(runs))


def compared(runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Return a row for each figure of (old, new) pairs: medians, and the ratios of the pairs."""
    rows = []
    for name in runs[0][0]:
        pairs = [(old[name], new[name]) for old, new in runs]
        medians = [f"{statistics.median(side):.4g}" for side in zip(*pairs, strict=True)]
        ratios = [new / old for old, new in pairs]
        rows.append((name, *medians, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"))
    return rows


def revision(root: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "no commit"


# Loads.


async def closed_loop(
    send: Callable[[Any], Coroutine[Any, Any, Any]], requests: Sequence[Any], clients: int
) -> list[Any]:
    """Return the answers of `clients` clients that each send the next request when one is answered."""
    load: Any = Load()
    await bench_load.closed_loop(send, requests, clients, load)
    return list(load.outcomes)


async def open_loop(send: Callable[[Any], Coroutine[Any, Any, Any]], requests: Sequence[Any]) -> list[Any]:
    """Return the answers to requests that are sent at their times (`at_s`), whether others are answered or not."""
    load: Any = Load()
    await bench_load.open_loop(send, requests, load)
    return list(load.outcomes)


async def finish_cancelled(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def unique_prompt(rng: random.Random, words: int) -> str:
    """Return a text that no prefix cache has seen."""
    return " ".join([nonce(), *rng.choices(WORDS, k=words)])


# Statistics, tables and command lines.


def quantile(values: Iterable[float], q: float) -> float:
    """Return the smallest value that is at least as large as the share `q` of all; NaN without values."""
    given = list(values)
    return float(np.quantile(given, q, method="inverted_cdf")) if given else float("nan")


def quantiles(values: Iterable[float], *shares: float) -> list[float]:
    """Return several quantiles of the same values."""
    given = list(values)
    return [quantile(given, share) for share in shares]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]] = ()) -> None:
    """Print the head of a Markdown table, and rows that are known already."""
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for cells in rows:
        row(*cells)


def row(*cells: object) -> None:
    """Print a row of a Markdown table, floats with two decimals."""
    print(f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in cells)} |", flush=True)


def arguments(
    doc: str | None, measures: Iterable[str] = (), quick: Mapping[str, Any] | None = None, **options: tuple[Any, str]
) -> argparse.Namespace:
    """Parse the command line of a script.

    Args:
        doc: text of --help.
        measures: choices of a positional argument.
        quick: other defaults under --quick.
        options: (default, help) by name. False makes a switch, a tuple a list separated by commas, a type an option
            without a default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if measures:
        parser.add_argument("measure", choices=list(measures))
    for name, (default, text) in options.items():
        add = partial(parser.add_argument, f"--{name.replace('_', '-')}")
        if default is False:
            add(action="store_true", help=text)
        elif isinstance(default, type):
            add(type=default, help=text)
        elif isinstance(default, tuple):
            shown = ",".join(map(str, default))
            add(type=partial(_list, type(default[0])), default=default, help=f"{text} (default: {shown})")
        else:
            add(type=type(default), default=default, help=f"{text} (default: {default})")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="a smoke test: little of everything")
        if parser.parse_known_args()[0].quick:
            parser.set_defaults(**quick)
    return parser.parse_args()


def _list(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    return tuple(kind(part) for part in text.split(","))
