"""Comm: how ranks exchange tensors within a step, over any transport.

All ranks call the same operations in the same order, so messages need no names or numbers. A rank that waits too long,
or for a rank that has ended, raises `RankLost`; the process then ends, because a partly computed step cannot be
repeated.
"""

import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lorasrv.distributed.frames import RankLost

Shape = Sequence[int]
TIMEOUT_S = 120.0
"""Longest wait for a live rank that does not answer; a dead one is noticed sooner (`pulse.py`)."""


class Comm(ABC):
    """Carry tensors between the ranks of one replica. For the thread that computes steps.

    Args:
        rank: rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @property
    def meets_later(self) -> bool:
        """Return whether ranks still connect to each other after this object was created."""
        return False

    @abstractmethod
    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to a rank that receives it. It may be changed afterwards."""

    @abstractmethod
    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        """Return the tensor that a rank sends."""

    @abstractmethod
    def gather(self, part: Tensor, shapes: Sequence[Shape], ranks: tuple[int, ...]) -> list[Tensor]:
        """Return the parts of these ranks, in their order; each of them calls this. `shapes` has the parts' shapes."""

    def gather_columns(self, part: Tensor, widths: Sequence[int], ranks: tuple[int, ...]) -> Tensor:
        """Return the columns of these ranks side by side: [T, own width] -> [T, sum of widths]."""
        return torch.cat(self.gather(part, [(len(part), width) for width in widths], ranks), dim=1)

    def gather_sum(self, part: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return the sum of the parts of these ranks, which have the same shape. They are added in rank order, so that
        all ranks get the same bits."""
        total, *others = self.gather(part, [part.shape] * len(ranks), ranks)
        for other in others:
            total += other
        return total

    def gather_rows(self, part: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Tensor:
        """Return the rows of these ranks one after another: [own count, W] -> [sum of counts, W]."""
        return torch.cat(self.gather(part, [(count, part.shape[1]) for count in counts], ranks))

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the transport."""


class LoneComm(Comm):
    """Carry nothing: what other ranks would send is zeros.

    Args:
        device: device of the tensors.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank)
        self._device = device

    def send(self, tensor: Tensor, to: int) -> None:
        """Do nothing."""

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def gather(self, part: Tensor, shapes: Sequence[Shape], ranks: tuple[int, ...]) -> list[Tensor]:
        return [self.receive(shape, part.dtype, rank) for shape, rank in zip(shapes, ranks, strict=True)]

    def close(self) -> None:
        """Do nothing."""


class MemoryComm(Comm):
    """Carry tensors between threads of one process: for tests.

    Args:
        boxes: queues of all pairs (from, to), shared by all ranks; see `between`.
    """

    def __init__(self, rank: int, boxes: dict[tuple[int, int], "queue.SimpleQueue[Tensor]"], timeout_s: float) -> None:
        super().__init__(rank)
        self._boxes, self._timeout_s = boxes, timeout_s

    @classmethod
    def between(cls, count: int, timeout_s: float = TIMEOUT_S) -> list["MemoryComm"]:
        """Return a comm for each of `count` ranks."""
        boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (source, to): queue.SimpleQueue() for source in range(count) for to in range(count)
        }
        return [cls(rank, boxes, timeout_s) for rank in range(count)]

    def send(self, tensor: Tensor, to: int) -> None:
        self._boxes[self.rank, to].put(tensor.clone())

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        try:
            tensor = self._boxes[source, self.rank].get(timeout=self._timeout_s)
        except queue.Empty:
            raise RankLost(f"rank {source} has not answered rank {self.rank} for {self._timeout_s:g} s") from None
        fits = tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
        assert fits, "ranks compute different passes"
        return tensor

    def gather(self, part: Tensor, shapes: Sequence[Shape], ranks: tuple[int, ...]) -> list[Tensor]:
        for rank in ranks:
            self.send(part, rank)
        return [self.receive(shape, part.dtype, rank) for rank, shape in zip(ranks, shapes, strict=True)]

    def close(self) -> None:
        """Do nothing: the boxes are freed with the last rank."""
