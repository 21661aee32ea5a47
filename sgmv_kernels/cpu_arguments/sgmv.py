"""Arguments of the kernels of `cpu_ops.sgmv`, and the layout of its tasks."""

from sgmv_kernels.formats.adapter_panels import MAX_SLICES

TILE_ROWS = 6
"""Most rows of x that are multiplied by A at a time, in the thread's scratch memory."""
SHRINK, EXPAND = 1, 2
TASK_INTS = 11
BLOCK, BEGIN, END, FIRST_SLICE, LAST_SLICE, ARE_CODES, FACTOR, TASK_PHASES, SHARE, SHARES, WAITS = range(TASK_INTS)
"""Places in a task: the segment and its first and last place, the slices, whether weights are int8 codes, the bits of
the segment's factor; which phases it does; which of how many shares of the rank rows and columns is its; and how many
tasks must be complete before it."""
PHASES, NUM_TASKS, TASKS, PERMUTATION, RECORDS, PANELS, SLAB = range(2, 9)
X, X_WIDTH, Y, Y_WIDTH, V, V_WIDTH, SCRATCH, SCRATCH_BYTES, PLACE, PLACE_BYTES, DONE, WIDTHS = range(9, 21)
"""Indices in the kernel's arguments, after the counters. PLACE is the number of (layer, site) pairs before this one;
DONE counts the tasks that others wait for."""
NUM_ARGS = WIDTHS + MAX_SLICES
