"""Arguments of the kernel of `cpu_ops.slots`."""

from sgmv_kernels.cpu_arguments.block import COUNTERS

NUM_LAYERS, LAYER_BYTES, NUM_MOVES, MOVES, SLAB, PAGE_BYTES, PLACES, UNITS, UNIT_BYTES = range(COUNTERS, 11)
"""Indices in the kernel's arguments, after the counters."""
NUM_ARGS = UNIT_BYTES + 1
