"""Arguments of the kernels of `cpu_ops.pointwise`."""

from sgmv_kernels.cpu_arguments.block import NUM_ROWS

ROWS = 4
"""Rows of a task, but for norms and activations: they have groups of rows, which the same thread may round. With fewer
rows than two tasks have, a second thread is not worth waking."""
COLUMNS = 512
"""Columns of a task of an activation."""
A, B, C, OUT, WIDTH, FLOAT = range(NUM_ROWS + 1, 9)
PAGES, SLOTS, HEADS, KV_HEADS, PAGE, KEYS, VALUES, PAGE_BYTES = range(9, 17)
"""Places in the kernels' arguments, after the counters. FLOAT holds a float64."""
HALF, KEY_SCALES, VALUE_SCALES, VALUE_MINIMA = range(PAGE_BYTES + 1, PAGE_BYTES + 5)
CODES, ROW_BYTES, UNITS, UNIT_BYTES = range(VALUE_MINIMA + 1, VALUE_MINIMA + 5)
"""Where the result goes as `cpu_ops.linear.RoundedRows`, too; CODES is 0 where it is not rounded."""
KEY_WIDTH = UNIT_BYTES + 1
NUM_ARGS = KEY_WIDTH + 1
