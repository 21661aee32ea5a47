"""Rounding of rows for quantized linears on the CPU, shared by the rounding kernel and the kernels that make rows."""

from typing import Any

from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.quant_matmul import ROWS_BLOCK, UNITS, make_rounding
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, ROW_GROUP


@kernel_part
def place_of(start, row, row_bytes, place_bytes):  # type: ignore[no-untyped-def]
    """Return where a row's codes, or units, begin. Groups of rows begin at `start`, with `row_bytes` for each row;
    within a block, rows are `place_bytes` apart.
    """
    inside = row % ROW_GROUP
    return start + (row - inside) * row_bytes + inside * place_bytes


def make_round_blocks(is_ordered: bool) -> Any:
    """Return round_blocks(x, row_bytes, rows, order, codes, units, first, last), which rounds blocks `first` to `last`
    of `ROUND_ROWS` rows, as they are or in the order of the inputs at `order`.

    `x`: the first row, `row_bytes` before the next; `rows`: number of rows from it on. `codes`, `units`: the first
    row's place in `cpu_ops.linear.RoundedRows`.
    """
    round_block = make_rounding(is_ordered)

    @kernel_part
    def round_blocks(x, row_bytes, rows, order, codes, units, first, last):  # type: ignore[no-untyped-def]
        for j in range(first, last):
            at = j * 4 * CODE_BLOCK
            source = x if is_ordered else x + at
            round_block(source, row_bytes, rows, order + at, codes + j * ROWS_BLOCK, units + j * UNITS)

    return round_blocks


round_blocks, round_ordered_blocks = make_round_blocks(False), make_round_blocks(True)
