"""Largest of many numbers on the CPU: the Numba kernel of `cpu_ops.likeliest`, and a function that linears also use."""

import numpy as np

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.likeliest import LOGITS, NOT_FINITE, NUM_PEAKS, OUT, PEAKS, ROW_BYTES, WIDTH
from sgmv_kernels.cpu_arguments.linear import PEAK_BYTES
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import row_peak
from sgmv_kernels.cpu_simd.memory_access import f32, i32, put_i64, take_next

_BLOCK = 1024
"""Numbers that are searched at a time for the index of the largest."""


@kernel_part
def find_peak(x, width):  # type: ignore[no-untyped-def]
    """Return the largest of the numbers at x and its index (the first of equals); NaN and `NOT_FINITE` if one is NaN or
    infinite."""
    best, at = np.float32(-np.inf), np.int64(0)
    for first in range(0, width, _BLOCK):
        peak = row_peak(x + 4 * first, min(_BLOCK, width - first))
        if peak > best:
            best, at = peak, np.int64(first)
        elif peak != peak:
            return peak, np.int64(NOT_FINITE)
    while f32(x, at) != best:
        at += 1
    return best, at


@kernel_part
def _work(args):  # type: ignore[no-untyped-def]
    """Take rows until none is left."""
    while True:
        row = take_next(args.ctypes.data)
        if row >= args[NUM_ROWS]:
            return
        if args[PEAKS]:
            at = _highest(args[PEAKS] + row * PEAK_BYTES, args[NUM_PEAKS], args[NUM_ROWS] * PEAK_BYTES)
        else:
            at = find_peak(args[LOGITS] + row * args[ROW_BYTES], args[WIDTH])[1]
        put_i64(args[OUT], row, at)


@kernel_part
def _highest(peaks, count, stride):  # type: ignore[no-untyped-def]
    """Return the index of the largest of `count` peaks, the first of equals."""
    best, at = np.float32(-np.inf), np.int64(0)
    for i in range(count):
        peak = f32(peaks + i * stride, 0)
        if peak > best:
            best, at = peak, i32(peaks + i * stride, 1)
        elif peak != peak:
            return np.int64(NOT_FINITE)
    return at


KERNELS = {"rows": _work}
