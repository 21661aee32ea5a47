"""Copy single keys and values inside the pool on the CPU: the Numba kernel that runs one thread's layers of
`cpu_ops.slots`.
"""

from typing import Any

import numpy as np
from numba import carray

from sgmv_kernels.cpu_ops.slots import (
    DIM,
    KEYS,
    KV_HEADS,
    LAYER_BYTES,
    MOVES,
    NUM_ARGS,
    NUM_LAYERS,
    NUM_MOVES,
    PAGE,
    PAGE_BYTES,
    VALUES,
)
from sgmv_kernels.cpu_simd.elementwise import BF16, FP16, FP32, copy_number, i32, itemsize, take_next
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part


def bf16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), BF16)


def fp16(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP16)


def fp32(raw: Any) -> None:
    _work(carray(raw, (NUM_ARGS,), np.int64), FP32)


@kernel_part
def _work(args, kind):  # type: ignore[no-untyped-def]
    """Take layers until none is left, and do all moves in each, in order."""
    page, dim = args[PAGE], args[DIM]
    while True:
        layer = take_next(args.ctypes.data)
        if layer >= args[NUM_LAYERS]:
            return
        keys, values = args[KEYS] + layer * args[LAYER_BYTES], args[VALUES] + layer * args[LAYER_BYTES]
        for move in range(args[NUM_MOVES]):
            source, target = (
                i32(args[MOVES], 4 * move) * args[PAGE_BYTES],
                i32(args[MOVES], 4 * move + 2) * args[PAGE_BYTES],
            )
            read, write = i32(args[MOVES], 4 * move + 1), i32(args[MOVES], 4 * move + 3)
            for head in range(args[KV_HEADS]):
                skip = head * dim * page * itemsize(kind)
                for d in range(dim):
                    copy_number(keys + source + skip, d * page + read, keys + target + skip, d * page + write, kind)
                    copy_number(values + source + skip, read * dim + d, values + target + skip, write * dim + d, kind)
