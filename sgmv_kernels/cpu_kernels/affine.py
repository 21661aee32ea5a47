"""Gain and shift of an adapter on the CPU: the Numba kernel that runs one thread's tasks of `cpu_ops.affine`."""

import numpy as np

from sgmv_kernels.cpu_arguments.affine import (
    NUM_TASKS,
    PLACE,
    PLACE_BYTES,
    SLAB,
    TASK_INTS,
    TASKS,
    VECTORS,
    WIDTH,
    Y,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import add_weighted, weighted
from sgmv_kernels.cpu_simd.memory_access import f32, i32, take_next
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES

_UNIT = ALIGNMENT_BYTES


@kernel_part
def _rows(args):  # type: ignore[no-untyped-def]
    """Take rows until none is left."""
    width = args[WIDTH]
    while True:
        task = take_next(args.ctypes.data)
        if task >= args[NUM_TASKS]:
            return
        at = args[TASKS] + task * (4 * TASK_INTS)
        vectors = args[VECTORS] + args[PLACE] * args[PLACE_BYTES] + 8 * i32(at, 0)
        y = args[Y] + 4 * width * i32(at, 1)
        if i32(vectors, 0) >= 0:
            weighted(y, args[SLAB] + i32(vectors, 0) * _UNIT, width, np.float32(1), y)
        if i32(vectors, 1) >= 0:
            add_weighted(y, args[SLAB] + i32(vectors, 1) * _UNIT, width, f32(at, 2))


KERNELS = {"rows": _rows}
