"""Copies of single keys and values inside the pool on a GPU: one launch for all layers. Speed is NOT MEASURED yet."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sgmv_kernels.formats.kv_pages import KvPages, layer_bytes
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.triton_ops.common import as_bound, kernel

BLOCK = 512
"""Units of a program."""


def copy_slots(layers: Sequence[KvPages], moves: Int32) -> None:
    """See `ops.Ops.copy_slots`."""
    kv, device = layers[0], layers[0].slab.device
    (numbers,) = upload([moves.reshape(-1)], device)
    places = kv.token_places()
    units = kv.slab.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[kv.unit_bytes])
    _copy_slots_kernel[(len(layers), triton.cdiv(places.shape[1], BLOCK))](
        units,
        places,
        numbers,
        len(moves),
        layer_bytes(layers) // kv.unit_bytes,
        kv.page_bytes // kv.unit_bytes,
        UNITS=places.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
    )


@kernel("count")
def _copy_slots_kernel(  # type: ignore[no-untyped-def]
    slab,
    places,
    moves,
    count,
    layer,
    page,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do all moves of some units of one layer in order; each thread reads and writes only its own units."""
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = unit < UNITS
    own = slab + tl.program_id(0).to(tl.int64) * layer
    for at in range(as_bound(count)):
        move = moves + at * 4
        source_page, source_slot = tl.load(move), tl.load(move + 1)
        target_page, target_slot = tl.load(move + 2), tl.load(move + 3)
        source = tl.load(places + source_slot * UNITS + unit, mask=ok, other=0)
        target = tl.load(places + target_slot * UNITS + unit, mask=ok, other=0)
        held = tl.load(own + source_page * page + source, mask=ok)
        tl.store(own + target_page * page + target, held, mask=ok)
