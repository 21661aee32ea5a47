"""Codes of quantized weights: their levels, and the blocks that kernels store and multiply. Imports no torch."""

INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS = 256, 16, 11
"""Number of values of a code. 11 levels take 3.46 bits: two codes fit into seven bits."""
TILE, CODE_BLOCK, CHUNK = 16, 32, 1024
"""Blocks in which the CPU kernels process a quantized weight: outputs; neighbouring inputs, which divide a group; most
inputs that are unpacked together.
"""
STEP_GROUPS = 8
"""Number of groups of a quantized weight whose factors share a step (`group_quant`)."""
ROW_GROUP = 16
"""Rows whose rounded activations are stored together, so that the rows that a CPU kernel multiplies are adjacent."""
ROUND_ROWS = 8
"""Rows that are rounded at a time, a divisor of `ROW_GROUP`."""
