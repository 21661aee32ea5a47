"""Run attention with kernels that log the addresses that they prefetch, in a separate process."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from sgmv_kernels.backend import Scoring
from sgmv_kernels.cpu_arguments.attention import THREADS
from sgmv_kernels.cpu_ops.attention import sequences_part
from sgmv_kernels.cpu_runtime import kernel_cache, launch
from sgmv_kernels.cpu_simd.vector_ir import Emitter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops

LINE = 64
PAGE, DIM, GROUP = 16, 64, 3
Block = tuple[str, int, int]
"""Part of a KV format, page, head."""
_log = np.zeros(1 << 20, dtype=np.int64)
"""The number of prefetched addresses, then the addresses."""


@dataclass(frozen=True)
class Decode:
    """A step with one row for each sequence; table entries after a sequence's pages are not valid pages."""

    kv_format: str
    tables: np.ndarray
    lens: list[int]
    heads: int
    window: int | None
    threads: int


def fetched_by(steps: list[Decode]) -> list[dict[Block, int]]:
    """Return the blocks that are prefetched in each step, in order, and the number of cache lines of each. One thread
    runs every task, but prefetches as if it were one of several.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_fetched_by, steps).result()


def _fetched_by(steps: list[Decode]) -> list[dict[Block, int]]:
    Emitter.fetch = _emit_log  # type: ignore[method-assign, assignment]
    # These kernels are not kept on disk, and kernels kept on disk are not used.
    kernel_cache.cache_directory = lambda: None  # type: ignore[assignment]
    launch.kernel_address = kernel_cache.address_of  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    return [_blocks_of(step) for step in steps]


def _emit_log(emit: Emitter, address: Any) -> None:
    b, word = emit.b, ir.IntType(64)
    log = b.inttoptr(ir.Constant(word, _log.ctypes.data), word.as_pointer())
    count = b.add(b.load(log), ir.Constant(word, 1))
    b.store(count, log)
    b.store(address, b.gep(log, [count]))


def _blocks_of(step: Decode) -> dict[Block, int]:
    kv_format, num_pages, ops = (
        KV_FORMATS[step.kv_format],
        step.tables.size,
        Ops(torch.device("cpu"), "numba"),
    )
    slab = torch.zeros(num_pages * kv_format.page_bytes(step.heads, DIM, PAGE), dtype=torch.uint8)
    kv, rows = KvPages(slab, kv_format, step.heads, PAGE, DIM), len(step.tables)
    plan = ops.plan_attention(step.tables, [1] * rows, step.lens, PAGE, num_pages)
    shape = GROUP * step.heads, step.heads, DIM
    part = sequences_part(plan, *shape)
    plan.prepared.parts[shape] = replace(part, words={**part.words, THREADS: step.threads})
    _log[0] = 0
    ops.paged_attention(torch.zeros(rows, shape[0], DIM), kv, plan, Scoring(1.0, step.window))
    addresses = dict.fromkeys(_log[1 : 1 + _log[0]].tolist())
    found: dict[Block, set[int]] = {}
    *offsets, _ = kv_format.offsets(step.heads, DIM, PAGE)
    for address in addresses:
        page, inside = divmod(address - slab.data_ptr(), kv.page_bytes)
        for kind, offset in zip(kv_format.parts, offsets, strict=True):
            head = (inside - offset) // kind.nbytes(1, DIM, PAGE)
            if 0 <= head < step.heads:
                found.setdefault((kind.name, page, head), set()).add(address // LINE)
    return {block: len(lines) for block, lines in found.items()}


def lines_of(kv_format: str) -> dict[str, int]:
    """Return the number of cache lines of a head of a page in each part."""
    return {part.name: -(-part.nbytes(1, DIM, PAGE) // LINE) for part in KV_FORMATS[kv_format].parts}
