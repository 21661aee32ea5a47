"""Copies of single keys and values inside the pool on the CPU: the Numba kernel that runs one thread's layers of
`cpu_ops.slots`.
"""

from sgmv_kernels.cpu_arguments.slots import (
    LAYER_BYTES,
    MOVES,
    NUM_LAYERS,
    NUM_MOVES,
    PAGE_BYTES,
    PLACES,
    SLAB,
    UNIT_BYTES,
    UNITS,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.memory_access import BF16, FP32, INT8, copy_number, i32, take_next


@kernel_part
def _copy(args):  # type: ignore[no-untyped-def]
    if args[UNIT_BYTES] == 1:
        _work(args, INT8)
    elif args[UNIT_BYTES] == 2:
        _work(args, BF16)
    else:
        _work(args, FP32)


@kernel_part
def _work(args, kind):  # type: ignore[no-untyped-def]
    """Take layers until none is left, and do all moves in each, in order, unit by unit; `kind` has the unit's size."""
    units = args[UNITS]
    while True:
        layer = take_next(args.ctypes.data)
        if layer >= args[NUM_LAYERS]:
            return
        slab = args[SLAB] + layer * args[LAYER_BYTES]
        for move in range(args[NUM_MOVES]):
            source = slab + i32(args[MOVES], 4 * move) * args[PAGE_BYTES]
            target = slab + i32(args[MOVES], 4 * move + 2) * args[PAGE_BYTES]
            places_from = args[PLACES] + 4 * units * i32(args[MOVES], 4 * move + 1)
            places_to = args[PLACES] + 4 * units * i32(args[MOVES], 4 * move + 3)
            for unit in range(units):
                copy_number(source, i32(places_from, unit), target, i32(places_to, unit), kind)


KERNELS = {"copy": _copy}
