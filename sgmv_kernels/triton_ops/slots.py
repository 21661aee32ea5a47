"""Copies of single keys and values inside the pool on a GPU: one launch for all layers. Speed is NOT MEASURED yet."""

from collections.abc import Sequence

import triton.language as tl

from sgmv_kernels.formats.kv_pages import KvPages, layer_bytes
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.triton_ops.common import as_bound, kernel, power_of_two


def copy_slots(layers: Sequence[KvPages], moves: Int32) -> None:
    """See `ops.Ops.copy_slots`."""
    kv = layers[0]
    (numbers,) = upload([moves.reshape(-1)], kv.slab.device)
    _copy_slots_kernel[(len(layers), kv.num_heads)](
        kv.keys,
        kv.values,
        numbers,
        len(moves),
        layer_bytes(layers) // kv.keys.itemsize,
        *kv.keys.stride(),
        *kv.values.stride(),
        D=kv.head_dim,
        D_PAD=power_of_two(kv.head_dim, 1),
        num_warps=1,
    )


@kernel("count")
def _copy_slots_kernel(  # type: ignore[no-untyped-def]
    keys,
    values,
    moves,
    count,
    layer,
    key_page,
    key_head,
    key_dim,
    key_slot,
    value_page,
    value_head,
    value_slot,
    value_dim,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Do all moves of one head of one layer in order: each thread reads and writes its own dimensions only."""
    d = tl.arange(0, D_PAD)
    skip = tl.program_id(0).to(tl.int64) * layer
    head = tl.program_id(1).to(tl.int64)
    key = keys + skip + head * key_head + d * key_dim
    value = values + skip + head * value_head + d * value_dim
    for at in range(as_bound(count)):
        move = moves + at * 4
        source_page, source_slot = tl.load(move), tl.load(move + 1)
        target_page, target_slot = tl.load(move + 2), tl.load(move + 3)
        held = tl.load(key + source_page * key_page + source_slot * key_slot, mask=d < D)
        tl.store(key + target_page * key_page + target_slot * key_slot, held, mask=d < D)
        held = tl.load(value + source_page * value_page + source_slot * value_slot, mask=d < D)
        tl.store(value + target_page * value_page + target_slot * value_slot, held, mask=d < D)
