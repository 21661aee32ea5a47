"""Comm over torch.distributed: gloo between processes on CPUs, NCCL between GPUs."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from lorasrv.distributed.comm import TIMEOUT_S, Comm, Shape
from lorasrv.distributed.frames import RankLost

LOOKS_S = 0.01
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The only network that ranks of one machine need; without it gloo listens where the host's name leads."""


class TorchComm(Comm):
    """Carry tensors between processes of one machine. Makes the one default group that torch has in a process.

    Args:
        device: of the tensors.
        meeting: a file in a private folder at which the ranks find each other; all give the same.
        groups: ranks that gather among themselves; all ranks give the same, in the same order.
    Raises:
        RankLost: not all ranks came.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        device: torch.device,
        meeting: Path,
        groups: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(rank)
        self._device = device
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        timeout = timedelta(seconds=TIMEOUT_S)
        _wait_for_all(rank, num_ranks, meeting)
        with _as_rank_lost():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=FileStore(str(meeting), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timeout,
            )
            self._groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in groups}

    @property
    def meets_later(self) -> bool:
        # NCCL connects when ranks first exchange something.
        return self._device.type == "cuda"

    def send(self, tensor: Tensor, to: int) -> None:
        with _as_rank_lost():
            dist.send(tensor.contiguous(), to)

    def receive(self, shape: Shape, dtype: torch.dtype, source: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        with _as_rank_lost():
            dist.recv(tensor, source)
        return tensor

    def gather(self, part: Tensor, shapes: Sequence[Shape], ranks: tuple[int, ...]) -> list[Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        # All parts must be of one size: shorter ones are padded.
        own = part.new_empty(max(sizes))
        own[: part.numel()] = part.reshape(-1)
        parts = [torch.empty_like(own) for _ in ranks]
        with _as_rank_lost():
            dist.all_gather(parts, own, group=self._groups[ranks])
        return [got[:size].view(tuple(shape)) for got, size, shape in zip(parts, sizes, shapes, strict=True)]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _wait_for_all(rank: int, num_ranks: int, meeting: Path) -> None:
    """Wait until all ranks are about to make their group: torch can neither be told to stop waiting for one, nor make
    a group of this process after one that failed.

    Raises:
        RankLost: not all ranks came, or the folder has been removed because one has ended.
    """
    signs = [meeting.with_suffix(f".{other}") for other in range(num_ranks)]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        signs[rank].touch()
        while missing := [other for other, sign in enumerate(signs) if not sign.exists()]:
            if time.monotonic() > deadline:
                raise RankLost(f"rank {missing[0]} has not come for {TIMEOUT_S:g} s")
            if not meeting.parent.exists():
                raise RankLost("the meeting has been given up")
            time.sleep(LOOKS_S)
    except OSError as error:
        raise RankLost(f"the meeting has been given up: {error}") from error


@contextlib.contextmanager
def _as_rank_lost() -> Iterator[None]:
    """Turn the errors of a transport into `RankLost`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"exchanging tensors with other ranks failed: {str(error).splitlines()[0]}") from error
