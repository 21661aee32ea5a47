"""Block of int64 words that a CPU kernel gets as its only argument: what all kernels have in it."""

COUNTERS = 2
"""First words of a kernel's arguments: the next task, and the next thread's number, for its place in scratch memory.
Every thread takes the next task when it has finished one, which balances tasks of unequal size."""
WORDS = 32
"""Words of a block, including the two counters."""
NUM_ROWS = COUNTERS
"""Index of the number of rows, in all kernels that loop over rows."""
