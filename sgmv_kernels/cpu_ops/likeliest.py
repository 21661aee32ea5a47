"""CPU launcher that finds the largest logit of each row.

In a recording, the linear that computes the logits finds the largest of each of its tasks, while they are in the cache
of the computing thread; this kernel then compares only these. Source: the reduction in the epilogue of a matrix
product, as in CUTLASS.
"""

import torch
from torch import Tensor

from sgmv_kernels.cpu_arguments.likeliest import LOGITS, NUM_PEAKS, OUT, PEAKS, ROW_BYTES, WIDTH
from sgmv_kernels.cpu_ops.linear import peaks_of
from sgmv_kernels.cpu_runtime.launch import empty, launch, rows_part

MODULE, ENTRY = "likeliest", "rows"


def likeliest_cpu(logits: Tensor) -> Tensor:
    """See `ops.Ops.likeliest`; in a recording, return the shared buffer."""
    rows, width = logits.shape
    out, peaks = empty("likeliest", (rows,), torch.int64), peaks_of(logits)
    own = {
        LOGITS: logits.data_ptr(),
        ROW_BYTES: logits.stride(0) * logits.itemsize,
        WIDTH: width,
        PEAKS: 0 if peaks is None else peaks.data_ptr(),
        NUM_PEAKS: 0 if peaks is None else len(peaks),
        OUT: out.data_ptr(),
    }
    launch(MODULE, ENTRY, rows_part(rows, rows), own)
    return out
