"""Arguments of the kernel of `cpu_ops.likeliest`."""

from sgmv_kernels.cpu_arguments.block import NUM_ROWS

LOGITS, ROW_BYTES, WIDTH, PEAKS, NUM_PEAKS, OUT = range(NUM_ROWS + 1, NUM_ROWS + 7)
"""Indices in the kernel's arguments, after the counters and the rows. PEAKS: 0, or what `peaks_of` returns."""
NUM_ARGS = OUT + 1
NOT_FINITE = -1
"""Written instead of an index if any of the numbers is NaN or infinite; the same number as `backend.NO_TOKEN`."""
