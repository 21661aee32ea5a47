"""Memory of packed weights: chunks for which huge pages are requested from the system.

A step reads every weight once. With pages of 4 KiB, the processor needs an address translation for every 64 cache
lines, also for prefetches, which makes products of 16 rows an eighth slower (docs/benchmarks/kernels.md).
"""

import mmap
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
"""Bytes taken from the system at a time."""
_ALIGNMENT = 64


class WeightMemory:
    """Allocate parts of large chunks, and larger parts separately. A chunk is freed with its last part."""

    def __init__(self) -> None:
        # A weak reference to the chunk that parts are taken from, None once it is freed: only its parts keep it alive.
        self._chunk: Callable[[], npt.NDArray[np.uint8] | None] = lambda: None
        self._taken = 0
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 with arbitrary content that begins at a cache line."""
        if nbytes > CHUNK_BYTES:
            return torch.from_numpy(_mapped(nbytes))
        with self._taking:
            chunk = self._chunk()
            if chunk is None or self._taken + nbytes > len(chunk):
                chunk = _mapped(CHUNK_BYTES)
                self._chunk, self._taken = ref(chunk), 0
            part = chunk[self._taken : self._taken + nbytes]
            self._taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        # Not a slice of a tensor, which would share the other parts' storage, and the first one's inference mode.
        return torch.from_numpy(part)


def _mapped(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new bytes that begin at a page."""
    held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # A kernel without huge pages refuses the advice.
            held.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(held, dtype=np.uint8)
