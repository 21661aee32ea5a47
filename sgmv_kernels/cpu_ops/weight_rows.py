"""CPU launcher that looks up rows of packed codes, as an embedding does."""

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.weight_rows import (
    CODE_BYTES,
    COUNT,
    DATA,
    FLOAT,
    GROUP,
    HALF,
    IDS,
    KIND,
    LEVELS,
    ORDER,
    OUT,
    RUN_BYTES,
    RUNS,
    STEPS,
    TABLE,
    ZEROS,
)
from sgmv_kernels.cpu_ops.weight_packing import CodeTiles, Factors
from sgmv_kernels.cpu_runtime.launch import Part, empty, launch
from sgmv_kernels.formats.weight_codes import TILE

MODULE, ENTRY, PART = "weight_rows", "rows", "looked up"


def rows_cpu(tiles: CodeTiles, ids: Tensor) -> Tensor:
    """Return the weights [N, in_features] fp32 of some outputs, ids [N] int64.

    Raises:
        IndexError: an id is not that of an output.
    """
    ids, factors = ids.contiguous(), tiles.factors
    # As unsigned integers, negative ids are very large.
    if ids.numpy().view(np.uint64).max(initial=0) >= tiles.out_features:
        raise IndexError(f"ids must be from 0 to {tiles.out_features - 1}")
    out = empty("embedded", (len(ids), tiles.in_features))
    kind = FLOAT if factors.dtype == torch.float32 else STEPS if factors is Factors.STEPS else HALF
    _, runs, run_bytes = tiles.data.shape
    own = {
        DATA: tiles.data.data_ptr(),
        RUNS: runs,
        RUN_BYTES: run_bytes,
        CODE_BYTES: tiles.code_bytes,
        GROUP: tiles.group,
        LEVELS: tiles.levels,
        KIND: kind + (ZEROS if factors in (Factors.ZEROS, Factors.FP32) else 0),
        COUNT: (run_bytes - tiles.code_bytes) // (TILE * (10 if kind == STEPS else factors.dtype.itemsize)),
        TABLE: 0 if tiles.table is None else tiles.table.data_ptr(),
        ORDER: 0 if tiles.order is None else tiles.order.data_ptr(),
        OUT: out.data_ptr(),
    }
    launch(MODULE, ENTRY, ids_part(ids), own)
    return out


def ids_part(ids: Tensor) -> Part:
    """Return the words that a step gives to `rows_cpu`: ids [N] int64, contiguous, which the caller keeps."""
    return Part(PART, {NUM_ROWS: len(ids), IDS: ids.data_ptr()}, len(ids))
