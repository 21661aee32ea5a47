"""Compute quantized linears on the CPU in AMX registers: the part of a thread's tasks that `linear` gives them."""

from typing import Any

from sgmv_kernels.cpu_ops.linear import (
    CODE_BYTES,
    CODES,
    GROUP,
    GROUPS,
    ROW_BYTES,
    TABLE,
    UNIT_BYTES,
    UNITS,
)
from sgmv_kernels.cpu_simd import quant_matmul as qm
from sgmv_kernels.cpu_simd.amx_matmul import AMX_ROWS, make_amx_product, make_unpack
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.quant_ir import HAS_AMX
from sgmv_kernels.cpu_simd.quant_matmul import TILES_AT_ONCE
from sgmv_kernels.formats.adapter_panels import CHUNK, CODE_BLOCK, TILE


@kernel_part
def _nothing(*args):  # type: ignore[no-untyped-def]
    pass


def make_amx(kind: str, unpack: Any = None) -> Any:
    """Return multiply(args, rows, data, next, ahead, scratch, sums, start, start_bytes, out, out_bytes) for one format;
    it does nothing where the processor has no AMX.

    `rows`: how many are multiplied, a multiple of `AMX_ROWS`. `sums`: `AMX_SUMS` bytes of scratch memory of this
    thread, whose registers `configure_amx` has prepared.

    Args:
        kind: as of `linear.make_linear`.
        unpack: what `amx_matmul.make_unpack` makes, if that does not know how the codes are stored.
    """
    if not HAS_AMX:
        return _nothing
    unpack_codes, product = unpack or make_unpack(kind), make_amx_product(kind)
    factor_bytes = qm.CODES[kind].factors.nbytes

    @kernel_part
    def multiply(args, rows, data, following, ahead, scratch, sums, start, start_bytes, out, out_bytes):  # type: ignore[no-untyped-def]
        """Write the products with all groups of the tiles, and prefetch what lies `ahead` of the tiles."""
        group, stored, blocks = args[GROUP], args[CODE_BYTES], args[GROUP] // CODE_BLOCK
        group_bytes, step = stored + factor_bytes, max(1, CHUNK // group)
        for first in range(0, args[GROUPS], step):
            count, source = min(step, args[GROUPS] - first), data + first * group_bytes
            tile_bytes = count * group * TILE
            for i in range(TILES_AT_ONCE):
                for g in range(count):
                    target = scratch + i * tile_bytes + g * group * TILE
                    unpack_codes(source + i * following + g * group_bytes, group, args[TABLE], ahead, target)
            tiles = scratch, tile_bytes, source, following, count, group, stored
            for row in range(0, rows, AMX_ROWS):
                x = args[CODES] + row * args[ROW_BYTES] + first * blocks * qm.ROWS_BLOCK
                u = args[UNITS] + row * args[UNIT_BYTES] + first * blocks * qm.UNITS
                begun, written = start + row * start_bytes, out + row * out_bytes
                product(x, u, *tiles, begun, start_bytes, written, out_bytes, sums)
            start, start_bytes = out, out_bytes

    return multiply
