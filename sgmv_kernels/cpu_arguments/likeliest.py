"""Arguments of the kernel of `cpu_ops.likeliest`."""

from sgmv_kernels.cpu_arguments.block import NUM_ROWS

LOGITS, ROW_BYTES, WIDTH, PEAKS, NUM_PEAKS, OUT = range(NUM_ROWS + 1, NUM_ROWS + 7)
"""Indices in the kernel's arguments, after the counters and the rows. PEAKS: 0, or what `peaks_of` returns."""
NUM_ARGS = OUT + 1
NOT_FINITE = -1
"""Index of the largest of numbers one of which is NaN or infinite; `backend.NO_TOKEN` as a result of the op."""
