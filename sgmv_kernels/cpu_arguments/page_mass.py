"""Arguments of the kernels of `cpu_ops.page_mass`: those of attention, but for two."""

from sgmv_kernels.cpu_arguments.attention import VALUE_MINIMA, VALUE_SCALES

OBSERVED, NUM_OBSERVED = VALUE_SCALES, VALUE_MINIMA
"""Indices of arguments, in place of those of values: table [T] int32 of rows' indices in the sums, number of them."""
