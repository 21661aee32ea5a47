"""Measurements that choose the fastest base linears for this machine. Each runs once per machine and is kept.

Two thresholds depend on the processor:

- The number of rows from which a dequantized bf16 copy of a weight is faster than the quantized weight. Only processors
  that multiply bf16 (AVX-512 BF16, AMX) are measured; on others, and for few rows, the quantized kernels are the
  fastest known (docs/benchmarks/kernels.md#beside-torchs-ops). The copy needs memory, and steps that use it round their
  rows differently from smaller steps, so a minimum gain is required (`--bf16-linears off`).
- The number of rows from which AMX registers are faster than `vpdpbusd`. They are used only if their results are the
  same, bit by bit.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.cpu_ops.linear import linear_cpu, pack_linear_cpu
from sgmv_kernels.cpu_runtime.amx import may_use_amx
from sgmv_kernels.cpu_runtime.measurements import keep, kept
from sgmv_kernels.cpu_runtime.processor import features
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, ROW_GROUP

logger = logging.getLogger(__name__)
CANDIDATES, GAIN = (64, 128, 256), 1.3
"""Numbers of rows from which bf16 may be used, and the factor by which it must be faster."""
AMX_CANDIDATES, AMX_GAIN = (16, 32, 64), 1.15
"""The same for AMX. Each is measured with half a group of rows more, which is multiplied without AMX. A step gains less
than this factor, because its weights come from memory."""
WIDTH, GROUP, ROUNDS = 2048, 64, 31
FILE, AMX_FILE, ROWS = "wide_rows.json", "amx.json", "rows"
Product = Callable[[Tensor], Tensor]


@cache
def wide_rows() -> int | None:
    """Return the number of rows from which the bf16 copy is used; None for never."""
    known = features()
    if not (known.get("avx512bf16") or known.get("amx-bf16")):
        return None
    return _rows(FILE, lambda: measured(*_products()))


@cache
def amx_rows() -> int | None:
    """Return the number of rows from which base linears are multiplied in AMX registers; None for never."""
    return _rows(AMX_FILE, lambda: measured_amx(*_products_by_amx())) if may_use_amx() else None


def _rows(file: str, measure: Callable[[], int | None]) -> int | None:
    """Return the number of rows measured earlier on this machine, or measure it and keep the result."""
    known = kept(file)
    if ROWS in known:
        return known[ROWS] if isinstance(known[ROWS], int) else None

    def by_all() -> int | None:
        torch.get_num_threads()
        torch.set_num_threads(all_threads())
        return measure()

    with ThreadPoolExecutor(1) as apart:
        # In another thread: the thread that loads models computes with one thread only.
        found = apart.submit(by_all).result()
    logger.info("measured for base linears on this machine, %s: from %s rows", file, found or "no number of")
    keep(file, {ROWS: found})
    return found


def all_threads() -> int:
    """Return the number of OpenMP threads: the first number of `OMP_NUM_THREADS`, or the number of processors."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else len(os.sched_getaffinity(0))


def measured(codes: Product, wide: Product, width: int = WIDTH) -> int | None:
    """Return the smallest candidate number of rows from which `wide` is faster than `codes` by the required factor."""
    return _from_rows(CANDIDATES, lambda rows: _gain(codes, wide, torch.randn(rows, width)) >= GAIN)


def measured_amx(plain: Product, by_amx: Product, width: int = WIDTH) -> int | None:
    """Return the smallest candidate number of rows from which AMX is faster by the required factor; None if there is
    none or AMX gives other results.
    """
    inputs = {rows: torch.randn(rows + ROW_GROUP // 2, width) for rows in AMX_CANDIDATES}
    if not all(torch.equal(plain(x), by_amx(x)) for x in inputs.values()):
        logger.warning("AMX gives wrong results on this processor and is not used; please report it")
        return None
    return _from_rows(AMX_CANDIDATES, lambda rows: _gain(plain, by_amx, inputs[rows]) >= AMX_GAIN)


def _from_rows(candidates: tuple[int, ...], is_faster: Callable[[int], bool]) -> int | None:
    """Return the smallest candidate for which, as for all larger ones, `is_faster` is true; None if there is none."""
    taken = list(takewhile(is_faster, reversed(candidates)))
    return taken[-1] if taken else None


def _products() -> tuple[Product, Product]:
    codes = _codes()
    packed, wide = pack_linear_cpu(codes, None, None, amx_rows()), codes.dequantize().bfloat16()
    return lambda x: linear_cpu(x, packed), lambda x: F.linear(x.bfloat16(), wide).float()


def _products_by_amx() -> tuple[Product, Product]:
    plain = pack_linear_cpu(_codes(), None, None)
    by_amx = replace(plain, amx_from=ROW_GROUP)
    return lambda x: linear_cpu(x, plain), lambda x: linear_cpu(x, by_amx)


def _codes() -> GroupQuantizedWeight:
    codes = torch.randint(INT4_LEVELS, (WIDTH, WIDTH), dtype=torch.uint8)
    scales = torch.full((WIDTH, WIDTH // GROUP), 0.01, dtype=torch.float16)
    return GroupQuantizedWeight(codes, scales, scales, INT4_LEVELS)


def _gain(product: Product, other: Product, x: Tensor) -> float:
    """Return how many times faster the other product is, from the fastest round of each.

    Rounds of both alternate, so that load from another process slows down both.
    """
    spent: tuple[list[float], ...] = [], []
    for _ in range(ROUNDS):
        for seconds, timed in zip(spent, (product, other), strict=True):
            begun = time.perf_counter()
            timed(x)
            seconds.append(time.perf_counter() - begun)
    return min(spent[0]) / min(spent[1])
