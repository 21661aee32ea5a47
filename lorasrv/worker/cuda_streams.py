"""Adapters from host memory to a GPU's pool beside the running steps: a pinned ring, a stream of its own, events.

A step is never waited for, and never waits: the copy's stream waits for the page operations that freed its pages, and
the copying thread for the copy, before anybody is told that the adapter is there. Not measured yet: no GPU was at hand.

A second stream of a GPU, for work of a step that can run beside the main one; works inside a captured graph too.

Memory that is made in it is given back to it, and its next work waits for all that the main stream was given before,
so nothing is overwritten that is still read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

RING_BYTES = 32 << 20
RING_SLOTS = 2
Piece = tuple[Tensor, Tensor]
"""(source on the host, target on the device), both uint8 and of one size."""


class StagingRing:
    """Pinned buffers in turn: one is filled by the processor while another is on its way. For one copying thread.

    `arranged` marks where the engine's stream has done the newest page operations.
    """

    def __init__(self, device: torch.device, slot_bytes: int = RING_BYTES // RING_SLOTS) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING_SLOTS)]
        self._sent = [torch.cuda.Event() for _ in range(RING_SLOTS)]  # type: ignore[no-untyped-call]
        self.arranged = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark_arranged(self) -> None:
        """What the calling thread's stream was given until now comes before every later copy."""
        self.arranged.record()

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copy every piece; returns when the device has all of them."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self.arranged)
            for number, (source, target) in enumerate(_cut(pieces, len(self._slots[0]))):
                slot, sent = self._slots[number % RING_SLOTS], self._sent[number % RING_SLOTS]
                sent.synchronize()
                slot[: len(source)].copy_(source)
                target.copy_(slot[: len(source)], non_blocking=True)
                sent.record()
        self._stream.synchronize()


def _cut(pieces: Sequence[Piece], size: int) -> list[Piece]:
    """Pieces of at most `size` bytes."""
    return [
        (source[start : start + size], target[start : start + size])
        for source, target in pieces
        for start in range(0, len(source), size)
    ]


class SideStream:
    """`with beside(): ...` starts after what the main stream has been given; `join` makes that wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
