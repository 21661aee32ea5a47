"""Thousands of small adapters in store folders, made once and kept: `bench_tiers.py make`.

Rank 4 on q_proj and v_proj of the built-in base in bf16, 460 KB each, seeded by their number: every file differs, and
so does what it does to the base. They go straight into a store folder, as `serve` would put them there, because
registering thousands over HTTP is not what is measured. Names are a0000, a0001, ... in the order of their popularity.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

RANK = 4
MODULES = ("self_attn.q_proj", "self_attn.v_proj")
FEW = 16
A_SPREAD, B_SPREAD = 0.05, 0.05
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [module.rpartition(".")[2] for module in MODULES],
}
PROGRESS_SECONDS = 10.0


def name_of(number: int) -> str:
    return f"a{number:04d}"


def names(count: int) -> list[str]:
    return [name_of(number) for number in range(count)]


def make(folder: Path, count: int) -> None:
    """Register what is missing of `count` adapters in `folder/store`; may be interrupted and called again."""
    folder.mkdir(parents=True, exist_ok=True)
    with _open_store(folder, _shapes()) as store:
        registered = {str(record.adapter_id) for record in store.list_adapters()}
        known = registered & digests(folder).keys()
        missing = [number for number in range(count) if name_of(number) not in known]
        _register(store, folder, missing, registered)
    print(f"{folder.name}: {count} adapters, {len(missing)} of them new", flush=True)


def store_opens_s(folder: Path) -> float:
    """Seconds until a store of this folder can be used: the part of a start that grows with what is registered."""
    shapes, seconds = _shapes(), []
    for _ in range(5):
        begun = time.perf_counter()
        with _open_store(folder, shapes):
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _shapes() -> BaseShapes:
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        return base_shapes(checkpoint.spec, checkpoint.name)


def _open_store(folder: Path, shapes: BaseShapes) -> AdapterStore:
    return AdapterStore(folder / "store", shapes, reserved_ids=frozenset({shapes.name}))


def _register(store: AdapterStore, folder: Path, numbers: list[int], registered: set[str]) -> None:
    begun = told = time.monotonic()
    with _digest_file(folder).open("a") as lines:
        for done, number in enumerate(numbers):
            data = weights_file(store.base, number)
            digest = hashlib.sha256(data).hexdigest()
            if name_of(number) not in registered:
                with store.open_blob(digest, len(data)) as upload:
                    upload.write(data)
                    upload.commit()
                store.register(name_of(number), CONFIG, digest)
            lines.write(f"{name_of(number)} {digest}\n")
            lines.flush()
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"  {done + 1} of {len(numbers)}, {(done + 1) / (told - begun):.0f} a second", flush=True)


def weights_file(base: BaseShapes, number: int) -> bytes:
    """The adapter's safetensors file."""
    rng = np.random.default_rng(number)
    header, parts, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, shape, spread in _tensors(base):
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread)
        parts.append((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _tensors(base: BaseShapes) -> Iterator[tuple[str, tuple[int, int], float]]:
    for layer in range(base.num_layers):
        for module in MODULES:
            n_in, n_out = base.modules[module]
            name = f"base_model.model.{base.layer_prefix}{layer}.{module}"
            yield f"{name}.lora_A.weight", (RANK, n_in), A_SPREAD
            yield f"{name}.lora_B.weight", (n_out, RANK), B_SPREAD


def _digest_file(folder: Path) -> Path:
    return folder / "digests.txt"


def digests(folder: Path) -> dict[str, str]:
    """Digest of each adapter's weights file, by name."""
    path = _digest_file(folder)
    return dict(line.split() for line in path.read_text().splitlines()) if path.exists() else {}


class Files:
    """The weights files of a store folder: whether the next read finds them in memory or has to go to the disk."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "store" / "blobs" / "sha256"
        self._digests = digests(folder)

    def __len__(self) -> int:
        return len(self._digests)

    def warm(self, name: str) -> None:
        (self._blobs / self._digests[name]).read_bytes()

    def cool(self, name: str) -> None:
        """Drop the file from the kernel's page cache."""
        fd = os.open(self._blobs / self._digests[name], os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
