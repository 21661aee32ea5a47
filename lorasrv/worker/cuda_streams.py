"""A CUDA stream of adapter copies beside running steps.

No step waits for a copy. The copy's stream waits for the page operations that freed the pages, and the copying thread
waits for the copy before it reports it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

RING_BYTES = 32 << 20
RING_SLOTS = 2
Piece = tuple[Tensor, Tensor]
"""(source on the host, target on the device), both uint8 and of the same size."""


class StagingRing:
    """Copy through alternating pinned buffers: one is filled while another is being sent. For one copying thread.

    `arranged` marks the point in the engine's stream after the newest page operations.
    """

    def __init__(self, device: torch.device, slot_bytes: int = RING_BYTES // RING_SLOTS) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING_SLOTS)]
        self._sent = [torch.cuda.Event() for _ in range(RING_SLOTS)]  # type: ignore[no-untyped-call]
        self.arranged = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark_arranged(self) -> None:
        """Order every later copy after the work submitted to the calling thread's stream so far."""
        self.arranged.record()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copy every piece; return when the device has all of them.

        Raises:
            Exception: a piece could not be copied; no write is in progress any more.
        """
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self.arranged)
                for number, (source, target) in enumerate(_cut(pieces, len(self._slots[0]))):
                    slot, sent = self._slots[number % RING_SLOTS], self._sent[number % RING_SLOTS]
                    sent.synchronize()
                    slot[: len(source)].copy_(source)
                    target.copy_(slot[: len(source)], non_blocking=True)
                    sent.record()
        finally:
            self._stream.synchronize()


def _cut(pieces: Sequence[Piece], size: int) -> list[Piece]:
    """Cut pieces into parts of at most `size` bytes."""
    return [
        (source[start : start + size], target[start : start + size])
        for source, target in pieces
        for start in range(0, len(source), size)
    ]
