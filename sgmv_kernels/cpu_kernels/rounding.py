"""Round rows for quantized linears on the CPU: the part that their own kernel and the kernels that make rows share."""

from typing import Any

from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.quant_matmul import ROWS_BLOCK, UNITS, make_rounding
from sgmv_kernels.formats.adapter_panels import CODE_BLOCK


def make_round_group(is_ordered: bool) -> Any:
    """Return round_group(x, row_bytes, rows, order, codes, units, first, last): round blocks `first` to `last` of a
    group of rows, as they are or in the order of the inputs at `order`.

    `x`: the group's first row, `row_bytes` before the next; `rows`: how many there are from it on. `codes`, `units`: of
    the group, see `cpu_ops.linear.RoundedRows`.
    """
    round_block = make_rounding(is_ordered)

    @kernel_part
    def round_group(x, row_bytes, rows, order, codes, units, first, last):  # type: ignore[no-untyped-def]
        for j in range(first, last):
            at = j * 4 * CODE_BLOCK
            source = x if is_ordered else x + at
            round_block(source, row_bytes, rows, order + at, codes + j * ROWS_BLOCK, units + j * UNITS)

    return round_group


round_group, round_ordered_group = make_round_group(False), make_round_group(True)
