"""Arguments of the kernels of `cpu_ops.attention`."""

TASK_INTS = 5
NUM_TASKS, TASKS, TABLES, TABLE_WIDTH, STARTS, LENS, PAGE, Q, HEADS, KV_HEADS = range(2, 12)
DIM, KEYS, VALUES, PAGE_BYTES, OUT, SCALE, WINDOW, SCRATCH, SCRATCH_BYTES, ROWS, BLOCK = range(12, 23)
SOFTCAP, TREES, WORDS, POSITIONS, KEY_SCALES, VALUE_SCALES, VALUE_MINIMA, SLOPES, THREADS = range(23, 32)
"""Indices in the kernel's arguments, after the counters. SCALE and SOFTCAP hold a float64; trees, words and
positions are 0 without draft trees, scales with pages of floats, minima with formats without minima, SLOPES without
ALiBi."""
NUM_ARGS = THREADS + 1
