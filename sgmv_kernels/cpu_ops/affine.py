"""CPU launcher of the gain and shift of adapters. A task is a row whose adapter has vectors."""

import numpy as np
from torch import Tensor

from sgmv_kernels.cpu_arguments.affine import NUM_TASKS, PLACE, PLACE_BYTES, SLAB, TASKS, VECTORS, WIDTH, Y
from sgmv_kernels.cpu_runtime.launch import Part, launch
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

MODULE, ENTRY = "affine", "rows"


def vectors_part(tables: SgmvTables) -> tuple[Part, tuple[Int32, ...]]:
    """Return the part that a step gives every launch, and the arrays that it points to."""
    tasks, vectors = tables.vector_rows(), np.ascontiguousarray(tables.vectors)
    words = {
        NUM_TASKS: len(tasks),
        TASKS: tasks.ctypes.data,
        VECTORS: vectors.ctypes.data,
        PLACE_BYTES: vectors.strides[1],
    }
    return Part(f"vectors {tables.turn}", words, len(tasks)), (tasks, vectors)


def affine_cpu_(y: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, place: int) -> None:
    """See `ops.Ops.affine_`."""
    own = {
        SLAB: slab.data_ptr(),
        Y: y.data_ptr(),
        WIDTH: y.shape[1],
        PLACE: layer * len(plan.tables.places) + place,
    }
    launch(MODULE, ENTRY, plan.prepared.vectors, own)
