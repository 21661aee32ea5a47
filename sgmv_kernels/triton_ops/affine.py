"""Gain and shift of adapters on a GPU: one program for each piece of a row. Speed is NOT MEASURED yet."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.sgmv_tables import SgmvTables
from sgmv_kernels.triton_ops.common import cast, kernel, power_of_two

BLOCK = 1024
"""Most numbers of a program."""


@dataclass(frozen=True, slots=True)
class VectorTables:
    """Hold the rows whose adapter has vectors, and the offsets of the vectors, on the device."""

    num_rows: int
    # int64 [N * 3], segment, row and the bits of the segment's factor.
    rows: Tensor
    # int64 [L * places * S * 2], offsets in units of `ALIGNMENT_BYTES`.
    offsets: Tensor

    @classmethod
    def of(cls, tables: SgmvTables, device: torch.device) -> "VectorTables":
        """Copy a step's tables to the device."""
        rows = tables.vector_rows()
        return cls(len(rows), *upload([rows.ravel(), tables.vectors.ravel()], device))


def affine_(y: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, place: int) -> None:
    """See `ops.Ops.affine_`."""
    held: VectorTables = plan.prepared.vectors
    if not held.num_rows:
        return
    width, block = y.shape[1], min(BLOCK, power_of_two(y.shape[1]))
    skip = (layer * len(plan.tables.places) + place) * plan.tables.num_segments
    _affine_kernel[(held.num_rows, triton.cdiv(width, block))](
        y,
        slab.view(torch.float32),
        held.rows,
        held.offsets,
        2 * skip,
        WIDTH=width,
        UNIT=ALIGNMENT_BYTES // 4,
        BLOCK=block,
        num_warps=4,
    )


@kernel("skip", unaligned=("rows", "offsets"))
def _affine_kernel(  # type: ignore[no-untyped-def]
    y,
    slab,
    rows,
    offsets,
    skip,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a piece of one row."""
    task = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < WIDTH
    segment, row = tl.load(rows + 3 * task), tl.load(rows + 3 * task + 1)
    factor = tl.load(rows + 3 * task + 2).to(tl.int32).to(tl.float32, bitcast=True)
    gain_at, shift_at = tl.load(offsets + skip + 2 * segment), tl.load(offsets + skip + 2 * segment + 1)
    gain = tl.load(slab + gain_at * UNIT + at, mask=ok & (gain_at >= 0), other=1.0)
    shift = tl.load(slab + shift_at * UNIT + at, mask=ok & (shift_at >= 0), other=0.0)
    own = y + row * WIDTH + at
    value = tl.load(own, mask=ok).to(tl.float32)
    tl.store(own, cast(value * gain + factor * shift, y.dtype.element_ty), mask=ok)
