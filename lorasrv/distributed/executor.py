"""The executor of a partition, for rank 0's engine: every step goes to all ranks, and rank 0 samples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lorasrv.distributed.frames import Frame, LinkClosed, RankLost
from lorasrv.distributed.rank0 import Ranks
from lorasrv.distributed.rank_adapters import (
    LayoutNumbers,
    RankPlaces,
    SharedAdapter,
    encode_adapter,
    rank_layout,
)
from lorasrv.distributed.rank_worker import COMMIT, FILL, READ
from lorasrv.distributed.step_frames import encode_page_op, encode_step
from lorasrv.errors import EngineDead
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import DropSwap, ModelRunnerOutput, PageOp, SchedulerOutput, SwapIn
from lorasrv.worker.adapter_loader import WriteAdapter
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.executor import InProcessExecutor, StepHandle
from lorasrv.worker.model_runner import BeforePass, ModelRunner, do_nothing
from lorasrv.worker.snapshot_loader import ReadPages, WritePages
from sgmv_kernels.formats.adapter_panels import PlacedAdapter


class PartitionedExecutor(InProcessExecutor):
    """Compute steps in all ranks. See `Executor`.

    A step that fails within the pass cannot be computed again: other ranks wait for parts that never arrive.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        super().__init__(runner)
        self._ranks, self._exchange = ranks, ranks.exchange
        self._numbers, self._places = LayoutNumbers(), RankPlaces(ranks.page_bytes)
        self._requests: dict[RequestId, int] = {}
        self._next_request = 0

    @property
    def write_adapter(self) -> WriteAdapter:
        return self._write_adapter

    @property
    def read_pages(self) -> ReadPages:
        return self._read_pages

    @property
    def write_pages(self) -> WritePages:
        return self._write_pages

    @property
    def lost(self) -> str | None:
        return self._ranks.links.monitor.lost

    @property
    def silence(self) -> str | None:
        return self._ranks.links.monitor.silence

    def exit_when_lost(self, tell: Callable[[str], None]) -> None:
        self._ranks.links.monitor.exit_when_lost(tell)

    def bind_thread(self, before_pass: BeforePass = do_nothing) -> None:
        self.runner.bind_thread(before_pass, self._ranks.threads)

    def collect(self, handle: StepHandle) -> ModelRunnerOutput:
        step = handle.step
        if not step.requests:
            return self.runner.run(step)
        own = self._own(step)
        frame = encode_step(step, self._numbers.of)
        self._exchange.is_within_pass = True
        with self._reaching():
            self._ranks.links.tell(frame)
            return self.runner.run(own)

    def apply_page_ops(self, ops: Sequence[PageOp]) -> int:
        """Execute operations in all ranks, and wait for them: an adapter may be written into pages that they free."""
        swapped = 0
        with self._reaching():
            for op in ops:
                swapped += self._apply(op)
        return swapped if ops else self.runner.apply_page_ops(())

    def recover(self) -> bool:
        is_amid = self._exchange.is_within_pass or self._ranks.links.is_broken_off
        return not is_amid and super().recover()

    def close(self) -> None:
        super().close()
        self._ranks.close()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Report which rank cannot be reached.

        Raises:
            EngineDead: a rank cannot be reached.
        """
        try:
            yield
        except (LinkClosed, RankLost) as error:
            raise EngineDead(self._ranks.links.why_lost(error)) from error

    @contextmanager
    def _filling(self, frames: Sequence[Frame]) -> Iterator[None]:
        """Have each other rank execute its frame, which fills pages, while the caller does its own part.

        Raises:
            RankFailed, RankOutOfMemory: a rank could not.
            EngineDead: a rank has ended.
        """
        with self._reaching(), self._ranks.links.asking_bulk(frames):
            yield

    def _apply(self, op: PageOp) -> int:
        with self._ranks.links.asking(encode_page_op(op, self._number_of)):
            swapped = self.runner.apply_page_ops((op,))
        if isinstance(op, SwapIn | DropSwap):
            self._requests.pop(op.request_id, None)
        return swapped

    def _number_of(self, request: RequestId) -> int:
        """Return a number that replaces a request's id in frames: the id has a label that a client chose."""
        if request not in self._requests:
            self._requests[request] = self._next_request
            self._next_request += 1
        return self._requests[request]

    def _own(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step with the places of adapters in this rank's pool."""
        places = {key: self._place(placed) for key, placed in step.placements.items()}
        return replace(step, placements=places)

    def _place(self, planned: PlacedAdapter) -> PlacedAdapter:
        number = self._numbers.of(planned.layout)
        self._places.learn(number, rank_layout(planned.layout, self._ranks.spec))
        return self._places.place(number, planned.runs)

    def _write_adapter(self, packed: PackedAdapter, placed: PlacedAdapter) -> None:
        """Fill an adapter's pages in all ranks; for loader threads.

        Raises:
            RankFailed, RankOutOfMemory: a rank could not.
        """
        assert isinstance(packed, SharedAdapter)
        number = self._numbers.of(placed.layout)
        frames = [encode_adapter(packed, placed, number, spec) for spec in self._ranks.specs[1:]]
        with self._filling(frames):
            self.runner.write_adapter(packed, self._places.make(packed.layout, placed.runs))

    def _read_pages(self, pages: tuple[int, ...]) -> Tensor:
        frame = Frame(READ, {}, [np.array(pages, dtype=np.int64)])
        with self._reaching(), self._ranks.links.asking(frame) as replies:
            own = self.runner.read_pages(pages)
        return torch.cat([own, *(torch.from_numpy(reply.arrays[0]) for reply in replies)], dim=1)

    def _write_pages(self, rows: Tensor, copies: Sequence[tuple[int, int]]) -> None:
        sizes = [self._ranks.block_bytes(rank) for rank in range(len(self._ranks.specs))]
        own, *others = torch.split(rows, sizes, dim=1)
        places = np.array(copies, dtype=np.int64).reshape(-1, 2)
        with self._filling([Frame(FILL, {}, [part.numpy(), places]) for part in others]):
            self.runner.write_pages(own.contiguous(), copies)

    def commit_pages(self, slab: int, first_page: int, num_pages: int) -> None:
        """See `Executor`. Another rank may have fewer slabs, or more; memory for additional ones is committed on use.

        Wait for all ranks: otherwise the next step would wait until a slower rank has committed every piece.
        """
        with self._reaching(), self._ranks.links.asking(Frame(COMMIT, {"piece": [slab, first_page, num_pages]})):
            self.runner.commit_pages(slab, first_page, num_pages)
