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
"""The only network interface that ranks of one machine need. By default gloo listens on the address of the host's
name, and NCCL on that of a network."""


class TorchComm(Comm):
    """Carry tensors between processes of one machine. Creates torch's default group, the only one of the process.

    Args:
        device: device of the tensors.
        meeting: file in a private folder through which the ranks find each other; the same for all ranks.
        groups: ranks that gather among themselves; the same for all ranks, in the same order.
    Raises:
        RankLost: not all ranks arrived.
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
        for transport in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{transport}_SOCKET_IFNAME", _LOOPBACK)
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
        # NCCL connects at the first exchange between ranks.
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
        # All parts must have the same size: shorter ones are padded.
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
    """Wait until all ranks are about to create their group. Torch's own wait for a rank cannot be interrupted, and
    after a failure it cannot create a group in this process again.

    Raises:
        RankLost: not all ranks arrived, or the folder was removed because one has ended.
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
