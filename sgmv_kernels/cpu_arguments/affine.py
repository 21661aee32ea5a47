"""Arguments of the kernel of `cpu_ops.affine`."""

NUM_TASKS, TASKS, VECTORS, PLACE_BYTES, Y, WIDTH, SLAB, PLACE = range(2, 10)
"""Indices in the kernel's arguments, after the counters. PLACE: number of (layer, place) pairs before this one."""
NUM_ARGS = PLACE + 1
TASK_INTS = 3
