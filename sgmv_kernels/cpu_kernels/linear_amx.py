"""Quantized linears on the CPU in AMX registers, for the rows of a thread's tasks that `linear` computes there."""

from typing import Any

import numpy as np

from sgmv_kernels.cpu_arguments.linear import (
    CODE_BYTES,
    CODES,
    GROUP,
    GROUPS,
    ROW_BYTES,
    TABLE,
    UNIT_BYTES,
    UNITS,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd import quant_matmul as qm
from sgmv_kernels.cpu_simd.amx_matmul import AMX_ROWS, make_amx_product, make_unpack
from sgmv_kernels.cpu_simd.quant_ir import HAS_AMX
from sgmv_kernels.cpu_simd.quant_matmul import LINE, TILES_AT_ONCE
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, TILE

AMX_CHUNK = 192
"""Inputs that are unpacked and multiplied together (a larger group alone): their integer sums stay in the L1 cache."""


@kernel_part
def _nothing(*args):  # type: ignore[no-untyped-def]
    pass


def make_amx(kind: str, unpack: Any = None) -> Any:
    """Return multiply(args, rows, data, next, soon, scratch, sums, start, start_bytes, between, out, out_bytes) for
    one format; it does nothing if the processor has no AMX.

    `rows`: the number of rows, a multiple of `AMX_ROWS`. `sums`: scratch memory of this thread for integer sums,
    `BLOCK_SUMS` bytes for each block of `CHUNK` inputs. `between`: memory for the rows' sums between chunks, one row
    after another. (Rows of the result may be so far apart that all map to the same few sets of the L1 cache.)
    `configure_amx` must have prepared the thread's registers.

    Args:
        kind: as in `linear.make_linear`.
        unpack: as in `linear.make_linear`; None: `amx_matmul.make_unpack` unpacks the stored codes.
    """
    if not HAS_AMX:
        return _nothing
    unpack_codes, product = unpack or make_unpack(kind), make_amx_product(kind)
    factor_bytes = qm.CODES[kind].factors.nbytes

    @kernel_part
    def multiply(args, rows, data, following, soon, scratch, sums, start, start_bytes, between, out, out_bytes):  # type: ignore[no-untyped-def]
        """Write the products with all groups of the tiles, and prefetch at least as many bytes at `soon`, whole lines
        for every block; if `soon` is `data`, this has no effect.
        """
        group, stored, blocks = args[GROUP], args[CODE_BYTES], args[GROUP] // CODE_BLOCK
        group_bytes, step = stored + factor_bytes, max(1, AMX_CHUNK // group)
        for first in range(0, args[GROUPS], step):
            count, source = min(step, args[GROUPS] - first), data + first * group_bytes
            is_last = first + count == args[GROUPS]
            end, end_bytes = (out, out_bytes) if is_last else (between, np.int64(TILES_AT_ONCE * LINE))
            tile_bytes = count * group * TILE
            for i in range(TILES_AT_ONCE):
                for g in range(count):
                    target = scratch + i * tile_bytes + g * group * TILE
                    unpack_codes(source + i * following + g * group_bytes, group, args[TABLE], target)
            tiles = scratch, tile_bytes, source, following, count, group, stored
            coming, slots = TILES_AT_ONCE * count * group_bytes, TILES_AT_ONCE * count * blocks
            passes = max(1, min(rows // AMX_ROWS, coming // (slots * LINE)))
            share = (coming + passes * slots * LINE - 1) // (passes * slots * LINE) * LINE
            for row in range(0, rows, AMX_ROWS):
                if passes == 0 or soon == data:
                    share = np.int64(0)
                x = args[CODES] + row * args[ROW_BYTES] + first * blocks * qm.ROWS_BLOCK
                u = args[UNITS] + row * args[UNIT_BYTES] + first * blocks * qm.UNITS
                begun, written = start + row * start_bytes, end + row * end_bytes
                product(x, u, *tiles, soon, share, begun, start_bytes, written, end_bytes, sums)
                passes, soon = passes - 1, soon + slots * share
            start, start_bytes = end, end_bytes

    return multiply
