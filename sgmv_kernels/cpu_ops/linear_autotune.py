"""Measure from how many rows a dequantized bf16 copy of a weight is faster than the quantized one.

The measurement runs once on a machine, and its result is stored. Only processors that multiply bf16 (AVX-512 BF16, AMX)
are measured; on others, and for few rows, the quantized kernels are the fastest known
(docs/benchmarks/kernels.md#beside-torchs-ops). The copy costs memory, and steps that use it round their rows
differently from smaller steps, so the gain must be worth it (`--bf16-linears off`).
"""

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import llvmlite.binding as llvm
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory, keep
from sgmv_kernels.formats.group_quant import INT4_LEVELS, GroupQuantizedWeight

logger = logging.getLogger(__name__)
CANDIDATES = (64, 128, 256)
GAIN = 1.3
"""Factor by which bf16 must be faster."""
WIDTH, GROUP, ROUNDS = 2048, 64, 3
FILE = "wide_rows.json"
Product = Callable[[Tensor], Tensor]


@cache
def wide_rows() -> int | None:
    """Return the number of rows from which bf16 is worth its copy; None for never."""
    features = llvm.get_host_cpu_features()
    if not (features.get("avx512bf16") or features.get("amx-bf16")):
        return None
    directory = cache_directory()
    path = None if directory is None else directory / FILE
    try:
        if path is not None:
            kept = json.loads(path.read_text())["rows"]
            return kept if isinstance(kept, int) else None
    except (OSError, ValueError, KeyError, TypeError):
        logger.debug("nothing is known of bf16 linears")
    with ThreadPoolExecutor(1) as apart:
        # In a thread of its own: the thread that loads models computes alone.
        found = apart.submit(_measured_by_all).result()
    logger.info("base linears of %s rows and more are computed in bf16", found)
    keep(path, {"rows": found})
    return found


def _measured_by_all() -> int | None:
    torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    return measured(*_products())


def measured(codes: Product, wide: Product, width: int = WIDTH) -> int | None:
    """Return the smallest candidate number of rows from which `wide` is faster than `codes` by the required factor."""
    found = None
    for rows in reversed(CANDIDATES):
        x = torch.randn(rows, width)
        if _seconds(codes, x) < GAIN * _seconds(wide, x):
            break
        found = rows
    return found


def _products() -> tuple[Product, Product]:
    from sgmv_kernels.cpu_ops.linear import linear_cpu, pack_linear_cpu

    scales = torch.full((WIDTH, WIDTH // GROUP), 0.01, dtype=torch.float16)
    codes = GroupQuantizedWeight(torch.ones((WIDTH, WIDTH), dtype=torch.uint8), scales, scales, INT4_LEVELS)
    packed, wide = pack_linear_cpu(codes, None, wide_from=None), codes.dequantize().bfloat16()
    return lambda x: linear_cpu(x, packed), lambda x: F.linear(x.bfloat16(), wide).float()


def _seconds(product: Product, x: Tensor) -> float:
    """Return the seconds of the fastest of a few rounds."""
    product(x)
    spent = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        product(x)
        spent.append(time.perf_counter() - begun)
    return min(spent)
