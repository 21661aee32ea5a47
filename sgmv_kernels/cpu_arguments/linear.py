"""Arguments of the kernels of `cpu_ops.linear`."""

from sgmv_kernels.cpu_arguments.block import NUM_ROWS

ROUND_BLOCKS = 8
"""Blocks in a rounding task; a block is 32 neighbours of eight rows."""
MOST_ROWS = 8
"""Most rows whose integer sums a kernel keeps at a time."""
WIDTH, X, CODES, ROW_BYTES, UNITS, UNIT_BYTES = range(NUM_ROWS + 1, 9)
TILES, TASK_TILES, DATA, GROUPS, GROUP, CODE_BYTES, Y, OUT, BIAS, SCRATCH, SCRATCH_AGAIN, SCRATCH_BYTES, LINES = range(
    9, 22
)
Y_WIDTH, ORDER, TABLE, EARLY, AMX_FROM, PEAKS = range(22, 28)
"""Indices in the kernels' arguments, after the counters. EARLY: whether a thread takes tasks ahead. AMX_FROM: number of
rows from which AMX registers are used, 0 for never. PEAKS: address of the largest outputs (`peaks_of`), 0 if they are
not needed."""
NUM_ARGS = PEAKS + 1
PEAK_BYTES = 8
"""Bytes of a peak: the number as fp32, and its index as int32."""
