"""Arguments of the kernel of `cpu_ops.weight_rows`."""

from sgmv_kernels.cpu_arguments.block import NUM_ROWS

IDS, DATA, RUNS, RUN_BYTES, CODE_BYTES, GROUP, LEVELS, KIND, COUNT, TABLE, ORDER, OUT = range(
    NUM_ROWS + 1, NUM_ROWS + 13
)
"""Indices in the kernel's arguments, after the counters and the rows. RUNS: groups of a row, or runs of groups that
share steps; GROUP: inputs of a group or run; COUNT: 2 if there are minima or zeros, else 1."""
NUM_ARGS = OUT + 1
HALF, FLOAT, STEPS = range(3)
"""Values of KIND: scales are fp16, fp32, or int8 that share fp16 steps."""
ZEROS = 4
"""Added to KIND if the second factor is a zero, not a minimum."""
