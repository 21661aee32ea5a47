"""Copies of single keys and values inside the pool in plain torch, in every KV format."""

from collections.abc import Sequence

from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import Int32


def copy_slots_torch(layers: Sequence[KvPages], moves: Int32) -> None:
    """See `ops.Ops.copy_slots`."""
    device = layers[0].slab.device
    source_pages, source_slots, target_pages, target_slots = upload(list(moves.T), device)
    for kv in layers:
        kv.format.copy(kv.parts, (source_pages, source_slots), (target_pages, target_slots))
