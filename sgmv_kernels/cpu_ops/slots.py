"""CPU launcher of copies of single keys and values inside the pool."""

from collections.abc import Sequence

import numpy as np

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
from sgmv_kernels.cpu_runtime.launch import Part, launch
from sgmv_kernels.formats.kv_pages import KvPages, layer_bytes
from sgmv_kernels.metadata.segments import Int32

MODULE, ENTRY = "slots", "copy"


def copy_slots_cpu(layers: Sequence[KvPages], moves: Int32) -> None:
    """See `ops.Ops.copy_slots`. A task is one layer."""
    kv, table = layers[0], np.ascontiguousarray(moves)
    places = kv.token_places()
    words = {
        NUM_LAYERS: len(layers),
        LAYER_BYTES: layer_bytes(layers),
        NUM_MOVES: len(table),
        MOVES: table.ctypes.data,
        SLAB: kv.slab.data_ptr(),
        PAGE_BYTES: kv.page_bytes,
        PLACES: places.data_ptr(),
        UNITS: places.shape[1],
        UNIT_BYTES: kv.unit_bytes,
    }
    launch(MODULE, ENTRY, Part(MODULE, words, len(layers)), {})
