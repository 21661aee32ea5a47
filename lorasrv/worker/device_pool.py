"""Device pool: the bytes behind the page ids, one preallocated buffer `[slabs, num_pages * page_bytes]`.

Each layer with its own keys and values has a slab; layers that read these share it. The same page id names a block in
every slab. Neighbouring ids are neighbours in memory, so a panel may span pages. No raw pointer leaves this module;
views are valid for one step.
"""

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lorasrv.config import size
from lorasrv.errors import NotEnoughMemory
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import CopyPages, DropSwap, PageOp, SlotMoves, SwapIn, SwapOut
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.cuda_streams import StagingRing
from lorasrv.worker.host_memory import commit
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.h2d import take, upload
from sgmv_kernels.ops import Ops

GATHERED_BYTES = 16 << 20
"""Device memory in which pages are gathered between their places and the host."""


class DevicePool:
    """Hold the pool's tensor on a device, viewed as KV pages or as raw slabs.

    Args:
        scratch: adds a page after the pool's, to which padding rows of a graph write; None: only on CUDA, which has
            graphs.
        page_bytes: bytes of a page in one slab, if more than its keys and values need, so that pages have the same size
            as on other ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        kv_format: KVFormat,
        device: torch.device,
        scratch: bool | None = None,
        page_bytes: int | None = None,
    ) -> None:
        has_scratch = device.type == "cuda" if scratch is None else scratch
        self.num_pages = num_pages
        self.scratch_page = num_pages if has_scratch else None
        self.page_size = page_size
        self.page_bytes = page_bytes or kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, page_size)
        pages = num_pages + has_scratch
        self._slab_of = spec.kv_slabs
        self._slabs = _zeros((spec.num_slabs, pages * self.page_bytes), device)
        self._pages = self._slabs.view(spec.num_slabs, pages, self.page_bytes)
        self._ring = StagingRing(device) if device.type == "cuda" else None
        self._copying = threading.Lock()
        self._swapped: dict[RequestId, Tensor] = {}
        self._kv = [
            KvPages(slab, kv_format, spec.num_kv_heads, page_size, spec.head_dim, self.page_bytes)
            for slab in self._slabs
        ]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffer."""
        return self._slabs.nbytes

    @property
    def device(self) -> torch.device:
        """Return the device of the buffer."""
        return self._slabs.device

    @property
    def slabs(self) -> Tensor:
        """Return all slabs of the pool, including the scratch page: uint8 [slabs, bytes]."""
        return self._slabs

    def slab(self, layer: int) -> Tensor:
        """Return a layer's slab of the pool: uint8 [bytes]."""
        return self._slabs[self._slab_of[layer], : self.num_pages * self.page_bytes]

    def kv_pages(self, layer: int) -> KvPages:
        """Return the keys and values that a layer reads."""
        return self._kv[self._slab_of[layer]]

    def apply(self, ops: Sequence[PageOp]) -> int:
        """Execute page operations in order; return the bytes copied to or from host memory."""
        swapped = 0
        for op in ops:
            match op:
                case CopyPages():
                    for source, target in op.copies:
                        self._pages[:, target].copy_(self._pages[:, source])
                case SwapOut():
                    kept = self._read(op.pages)
                    self._swapped[op.request_id] = kept
                    swapped += kept.nbytes
                case SwapIn():
                    kept = self._swapped[op.request_id]
                    self._write(kept, op.pages)
                    del self._swapped[op.request_id]
                    swapped += kept.nbytes
                case DropSwap():
                    # Absent if swapping out failed.
                    self._swapped.pop(op.request_id, None)
        self.order_writes()
        return swapped

    def order_writes(self) -> None:
        """Order every later write of pages after the work that the calling thread has submitted to the device so
        far."""
        if self._ring is not None:
            self._ring.mark_arranged()

    def copy_slots(self, moves: Sequence[SlotMoves], ops: Ops) -> None:
        """Move keys and values of sequences, in every slab, with one op; no page that is written may be shared."""
        size = self.page_size
        places = [
            (table[source // size], source % size, table[target // size], target % size)
            for table, sources, targets in moves
            for source, target in zip(sources, targets, strict=True)
        ]
        ops.copy_slots(self._kv, np.array(places, dtype=np.int32).reshape(-1, 4))

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a page in all slabs."""
        return len(self._slabs) * self.page_bytes

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """Return pages in host memory: uint8 [P, block bytes]. Call it between two steps, in their thread."""
        return self._read(pages).view(len(pages), self.block_bytes)

    def _read(self, pages: Sequence[int]) -> Tensor:
        """Return pages in host memory: uint8 [P, slabs, page bytes]."""
        rows = torch.empty((len(pages), len(self._slabs), self.page_bytes), dtype=torch.uint8)
        if self.device.type == "cpu":
            for row, page in zip(rows, pages, strict=True):
                row.copy_(self._pages[:, page])
            return rows
        for part in self._parts(len(pages)):
            _words(rows)[part].copy_(take(_words(self._pages).transpose(0, 1), pages[part]))
        return rows

    def _write(self, rows: Tensor, pages: Sequence[int]) -> None:
        """Fill pages from host memory, uint8 [P, slabs, page bytes]."""
        if self.device.type == "cpu":
            for row, page in zip(rows, pages, strict=True):
                self._pages[:, page].copy_(row)
            return
        for part in self._parts(len(pages)):
            (places,) = upload([np.array(pages[part])], self.device)
            _words(self._pages).transpose(0, 1).index_copy_(0, places, _words(rows)[part].to(self.device))

    def _parts(self, count: int) -> Iterator[slice]:
        """Yield the parts in which pages are copied to or from a GPU's host: each is gathered on the device, and then
        one copy, for which the host waits."""
        step = max(1, GATHERED_BYTES // self.block_bytes)
        return (slice(first, first + step) for first in range(0, count, step))

    def commit(self, slab: int, first_page: int, num_pages: int) -> None:
        """Have the system commit memory for pages of a slab; do nothing if the pool is not on the CPU or has no such
        slab."""
        if self._ring is None and slab < len(self._slabs):
            start = self._slabs[slab].data_ptr() + first_page * self.page_bytes
            commit(start, num_pages * self.page_bytes)

    def write_pages(self, rows: Tensor, copies: Sequence[tuple[int, int]]) -> None:
        """Fill pages from host memory.

        May run in another thread than the steps: nothing else uses these pages until it returns.

        Args:
            rows: uint8 [P, block bytes].
            copies: (row, page) pairs.
        """
        blocks = rows.view(len(rows), len(self._slabs), self.page_bytes)
        if self._ring is None:
            for row, page in copies:
                self._pages[:, page].copy_(blocks[row])
            return
        pieces = [
            (blocks[row, slab], self._pages[slab, page]) for row, page in copies for slab in range(len(self._slabs))
        ]
        with self._copying:
            self._ring.copy(pieces)

    def write_adapter(self, packed: PackedAdapter, placed: PlacedAdapter) -> None:
        """Copy an adapter's panels from host memory to their pages; contiguous pieces are one copy.

        May run in another thread than the steps: nothing else uses these pages until it returns.
        """
        pieces = [
            (packed.data[slab, source : source + size], self._slabs[slab, target : target + size])
            for slab, layers in enumerate(placed.layout.layers_of_slabs)
            for layer in layers
            for source, target, size in placed.copies(layer)
        ]
        if self._ring is not None:
            with self._copying:
                self._ring.copy(pieces)
            return
        for source, target in pieces:
            target.copy_(source)


def _words(pages: Tensor) -> Tensor:
    """Return uint8 [..., N] as int64 [..., N / 8], of which fewer are copied."""
    return pages.view(torch.int64)


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros; on the CPU through numpy's calloc, which commits memory on first write, so a large pool costs
    nothing until used.

    Raises: NotEnoughMemory.
    """
    try:
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        raise NotEnoughMemory(
            f"the pool of {size(math.prod(shape))} cannot be allocated; choose a smaller --pool-bytes"
        ) from None
