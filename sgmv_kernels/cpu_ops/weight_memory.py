"""Memory of packed weights: chunks for which the system is asked for huge pages.

A step reads every weight once. With pages of 4 KiB the processor looks up the address of one for every 64 lines, also
for those that are prefetched, which costs products of 16 rows an eighth of their rate (docs/benchmarks/kernels.md).
"""

import mmap
import sys
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
"""Bytes taken from the system at a time."""
_ALIGNMENT = 64


class WeightMemory:
    """Give parts of large chunks, and larger parts by themselves. A chunk is freed with the last of its parts; the one
    that parts are taken of now is kept.
    """

    def __init__(self) -> None:
        # No tensor: slices of one would share its storage, and its inference mode.
        self._left = np.empty(0, dtype=np.uint8)
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 with any content, which begins with a cache line."""
        reserved = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if reserved > CHUNK_BYTES:
            return torch.from_numpy(_chunk(nbytes))
        with self._taking:
            if reserved > len(self._left):
                self._left = _chunk(CHUNK_BYTES)
            taken, self._left = self._left[:nbytes], self._left[reserved:]
        return torch.from_numpy(taken)


def _chunk(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new bytes that begin with a page."""
    held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # A kernel without huge pages refuses the advice.
            held.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(held, dtype=np.uint8)
