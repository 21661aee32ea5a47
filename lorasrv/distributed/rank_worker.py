"""The worker of a rank other than 0: executes the orders of rank 0 one after another, and fills adapters' pages at the
same time."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lorasrv.distributed.frames import Frame, Link, LinkClosed
from lorasrv.distributed.rank_adapters import WRITE, RankPlaces, decode_layout, decode_runs, decode_weights
from lorasrv.distributed.rank_links import AFTER, DONE, MEMORY, OTHER, STOP, failure
from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.distributed.step_frames import PAGES, SLOTS, STEP, decode_moves, decode_page_op, decode_step
from lorasrv.worker.adapter_packing import pack_adapter
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device import compiles_kernels, is_out_of_memory
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.exchange import Exchange
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.ops import Ops

_LOG = logging.getLogger(__name__)
READ, FILL, COMMIT, WARM_UP = "read", "fill", "commit", "warm-up"
"""Read pages, fill pages, commit memory for pages, and compile kernels before the first step."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """Hold what a rank computes with."""

    spec: RankSpec
    weights: ModelWeights
    memory: DevicePool
    decoder: Decoder
    limits: DecoderLimits
    ops: Ops
    exchange: Exchange


class OrdersDone:
    """Count the orders that a rank has done, for the thread that fills pages."""

    def __init__(self) -> None:
        self._count, self._has_ended = 0, False
        self._changed = threading.Condition()

    def add(self) -> None:
        """Note that one more order is done."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Note that no more orders will be done."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Return whether no more orders will be done."""
        with self._changed:
            return self._has_ended

    def wait_for(self, count: int) -> bool:
        """Wait until `count` orders are done; return False if they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count or self._has_ended)
            return self._count >= count


class RankWorker:
    """Serve rank 0. `serve` and `serve_bulk` each run in their own thread.

    Pages are filled only after all orders that rank 0 sent before. Rank 0 may be many steps ahead, and these steps
    still read and write the pages that it has since given to an adapter.
    """

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._places = RankPlaces(model.memory.page_bytes)
        self._done = OrdersDone()

    def serve(self, orders: Link) -> None:
        """Execute orders until rank 0 stops the rank.

        Raises:
            Exception: a step could not be computed, or rank 0 has ended; neither can be repaired.
        """
        asked: dict[str, Callable[[Frame], Frame]] = {
            WARM_UP: self._warm_up,
            PAGES: self._apply,
            READ: self._read,
            COMMIT: self._commit,
        }
        told: dict[str, Callable[[Frame], None]] = {STEP: self._compute, SLOTS: self._move}
        try:
            while (frame := orders.receive()).kind != STOP:
                if frame.kind in told:
                    told[frame.kind](frame)
                else:
                    orders.send(_reply(asked[frame.kind], frame))
                # A GPU may not have computed the step yet.
                self._model.memory.order_writes()
                self._done.add()
        finally:
            self._done.end()

    def serve_bulk(self, bulk: Link) -> None:
        """Fill pages until the link or `serve` ends."""
        work: dict[str, Callable[[Frame], Frame]] = {WRITE: self._write, FILL: self._fill}
        try:
            while not self._done.has_ended:
                try:
                    frame = bulk.receive()
                except MemoryError as error:
                    _LOG.warning("there is too little memory for what rank 0 sends for pages")
                    bulk.send(failure(error, MEMORY))
                    continue
                if self._done.wait_for(frame.fields[AFTER]):
                    bulk.send(_reply(work[frame.kind], frame))
        except LinkClosed:
            pass  # rank 0 has ended; `serve` notices that, too

    def _warm_up(self, frame: Frame) -> Frame:
        model = self._model
        if compiles_kernels(model.memory.device, model.ops):
            # Imported only here: it needs Triton.
            from lorasrv.worker.warm_up import warm_up

            warm_up(model.decoder, model.memory, model.limits, model.ops, **frame.fields)
        return Frame(DONE)

    def _compute(self, frame: Frame) -> None:
        step = decode_step(frame, self._places.place)
        model = self._model
        batch = build_batch(step, model.memory, model.limits.adapter_dtype, model.ops, exchange=model.exchange)
        model.decoder.forward(batch)

    def _move(self, frame: Frame) -> None:
        self._model.memory.copy_slots(decode_moves(frame), self._model.ops)

    def _apply(self, frame: Frame) -> Frame:
        self._model.memory.apply((decode_page_op(frame),))
        return Frame(DONE)

    def _commit(self, frame: Frame) -> Frame:
        self._model.memory.commit(*frame.fields["piece"])
        return Frame(DONE)

    def _read(self, frame: Frame) -> Frame:
        return Frame(DONE, {}, [self._model.memory.read_pages(frame.arrays[0].tolist()).numpy()])

    def _fill(self, frame: Frame) -> Frame:
        rows, copies = frame.arrays
        self._model.memory.write_pages(torch.from_numpy(rows), [(row, page) for row, page in copies.tolist()])
        return Frame(DONE)

    def _write(self, frame: Frame) -> Frame:
        model = self._model
        layout = decode_layout(frame, model.spec)
        placed = self._places.make(layout, decode_runs(frame))
        packed = pack_adapter(model.weights, layout, decode_weights(frame), model.limits.adapter_dtype)
        model.memory.write_adapter(packed, placed)
        self._places.learn(frame.fields["number"], layout)
        return Frame(DONE)


def _reply(work: Callable[[Frame], Frame], frame: Frame) -> Frame:
    """Execute a frame, and return the reply."""
    try:
        return work(frame)
    except Exception as error:
        # Rank 0 reports this to the affected requests; the rank continues.
        _LOG.exception("an order of rank 0 (%s) failed", frame.kind)
        return failure(error, MEMORY if is_out_of_memory(error) else OTHER)
