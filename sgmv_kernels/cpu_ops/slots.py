"""CPU launcher of copies of single keys and values inside the pool."""

from collections.abc import Sequence

import numpy as np

from sgmv_kernels.cpu_runtime.launch import COUNTERS, Part, launch
from sgmv_kernels.formats.kv_pages import KvPages, layer_bytes
from sgmv_kernels.metadata.segments import Int32

MODULE = "slots"
NUM_LAYERS, LAYER_BYTES, NUM_MOVES, MOVES, KEYS, VALUES, PAGE_BYTES, KV_HEADS, DIM, PAGE = range(COUNTERS, 12)
"""Places in the kernel's arguments, after the counters."""
NUM_ARGS = PAGE + 1
ENTRIES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""KV formats that the kernel copies, and its entry for each."""


def copy_slots_cpu(layers: Sequence[KvPages], moves: Int32) -> None:
    """See `ops.Ops.copy_slots`. A task is one layer."""
    kv, table = layers[0], np.ascontiguousarray(moves)
    words = {
        NUM_LAYERS: len(layers),
        LAYER_BYTES: layer_bytes(layers),
        NUM_MOVES: len(table),
        MOVES: table.ctypes.data,
        KEYS: kv.keys.data_ptr(),
        VALUES: kv.values.data_ptr(),
        PAGE_BYTES: kv.page_bytes,
        KV_HEADS: kv.num_heads,
        DIM: kv.head_dim,
        PAGE: kv.page_size,
    }
    launch(MODULE, ENTRIES[kv.format.name], Part(MODULE, words, len(layers)), {})
