"""Measurement of the number of threads with which base linears are fastest, once per machine; the result is stored.

With few rows, memory limits the speed: fewer threads than available may saturate it, and every further thread adds
waiting time after each launch. The measurement runs in the thread that owns the team.
"""

import logging
import os
import time
from collections.abc import Callable

import torch

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_ops.linear import CpuLinear, linear_cpu, pack_linear_cpu
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, recording
from sgmv_kernels.cpu_runtime.measurements import keep, kept
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS

logger = logging.getLogger(__name__)
FILE = "threads.json"
GAIN = 1.2
"""Gain that fewer threads must show in two measurements, since other kernels gain more from many threads."""
FEW_THREADS = 4
"""Number of threads up to which all are used without measurement: so few do not saturate memory."""
WIDTH, GROUP, LAYERS, ROUNDS = 1024, 64, 48, 5
MANY_ROWS = 16


def best_threads(most: int) -> int:
    """Return the fastest number among `most`, half of it, a quarter, and so on; resizes the calling thread's team."""
    if most <= FEW_THREADS or "OMP_NUM_THREADS" in os.environ:
        return most
    known = kept(FILE).get(str(most))
    if isinstance(known, int) and 1 <= known <= most:
        return known
    seconds = _probe()
    found, again = choose(most, seconds), choose(most, seconds)
    if found != again:
        # Another process is using the processor: measure again at the next start.
        return most
    logger.info("base linears are fastest with %d of %d threads", found, most)
    keep(FILE, {str(most): found})
    return found


def choose(most: int, seconds: Callable[[int], float]) -> int:
    """Return the fastest count; fewer threads only for a gain."""
    best, least = most, seconds(most)
    count = most // 2
    while count:
        taken = seconds(count)
        if taken * GAIN < least:
            best, least = count, taken
        count //= 2
    return best


def _probe() -> Callable[[int], float]:
    """Return a function of the number of threads: the total seconds of a step of one row and one of many rows."""
    packed = [_layer() for _ in range(LAYERS)]
    x = torch.randn(MANY_ROWS, WIDTH)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        with recording() as recorded:
            for layer in packed:
                linear_cpu(x, layer)
        program = Program(recorded)
        return sum(min(_timed(program, rows) for _ in range(ROUNDS)) for rows in (1, MANY_ROWS))

    return seconds


def _timed(program: Program, rows: int) -> float:
    begun = time.perf_counter()
    program.run({ROWS: {NUM_ROWS: rows}})
    return time.perf_counter() - begun


def _layer() -> CpuLinear:
    scales = torch.full((WIDTH, WIDTH // GROUP), 0.01, dtype=torch.float16)
    codes = GroupQuantizedWeight(torch.ones((WIDTH, WIDTH), dtype=torch.uint8), scales, scales, INT4_LEVELS)
    return pack_linear_cpu(codes, None, wide_from=None)
