"""Memory of packed weights: chunks so large that the system gives huge pages.

A step reads every weight once. With pages of 4 KiB the processor looks up the address of one for every 64 lines, also
for those that are prefetched, which costs products of 16 rows an eighth of their rate (docs/benchmarks/kernels.md).
"""

import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
"""Bytes taken from the system at a time. From 4 MiB on, numpy asks for huge pages where they must be asked for."""
_ALIGNMENT = 64


class WeightMemory:
    """Give parts of large chunks. A chunk is freed with the last of its parts."""

    def __init__(self) -> None:
        # No tensor: slices of one would share its storage, and its inference mode.
        self._left = np.empty(0, dtype=np.uint8)
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 with any content, which begins with a cache line."""
        reserved = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._taking:
            if reserved > len(self._left):
                self._left = _chunk(max(reserved, CHUNK_BYTES))
            taken, self._left = self._left[:nbytes], self._left[reserved:]
        return torch.from_numpy(taken)


def _chunk(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new bytes that begin with a cache line."""
    held = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    first = -held.ctypes.data % _ALIGNMENT
    return held[first : first + nbytes]
