"""Tensor views of the pages in which one layer of the pool stores keys and values."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES, ITEM_BYTES, KEYS, VALUES, KVFormat


class KvPages:
    """View a layer of the pool as P pages of keys and values.

    Args:
        slab: [P * page bytes] uint8, contiguous; the views below share its memory.
        kv_format: layout of a page.
        heads: key heads.
        page_size: tokens of a page.
        head_dim: D, numbers of a head.
        page_bytes: distance between pages, at least the bytes that the format needs; None for these bytes.
    Attributes:
        parts: views [P, heads, *shape of a head's block] by the names of the format's parts; `keys` and `values` are
            two of them.
    Raises:
        KernelArgumentError: the slab is not a whole number of pages, or not contiguous bytes, or the format has no
            pages of this size.
    """

    def __init__(
        self,
        slab: Tensor,
        kv_format: KVFormat,
        heads: int,
        page_size: int,
        head_dim: int,
        page_bytes: int | None = None,
    ) -> None:
        if page_size % kv_format.page_step:
            raise KernelArgumentError(f"pages of {kv_format.name} have a multiple of {kv_format.page_step} tokens")
        *offsets, needed = kv_format.offsets(heads, head_dim, page_size)
        page_bytes = page_bytes or needed
        if page_bytes < needed or page_bytes % ALIGNMENT_BYTES:
            raise KernelArgumentError(f"pages must have a multiple of {ALIGNMENT_BYTES} bytes, {needed} or more")
        if slab.dtype != torch.uint8 or slab.dim() != 1 or not slab.is_contiguous() or slab.numel() % page_bytes:
            raise KernelArgumentError(f"slab must be contiguous uint8 [pages * {page_bytes}]")
        self.format, self.slab = kv_format, slab
        self.num_heads, self.page_size, self.head_dim, self.page_bytes = heads, page_size, head_dim, page_bytes
        pages = slab.view(-1, page_bytes)
        self.parts: dict[str, Tensor] = {}
        for part, offset in zip(kv_format.parts, offsets, strict=True):
            stored = pages[:, offset : offset + part.nbytes(heads, head_dim, page_size)]
            items = stored.view(getattr(torch, part.dtype))
            self.parts[part.name] = items.view(-1, heads, *part.shape(head_dim, page_size))
        self.keys, self.values = self.parts[KEYS], self.parts[VALUES]

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    def address(self, part: str) -> int:
        """Return the address of a part in the first page; 0 if the format has no part of this name."""
        return self.parts[part].data_ptr() if part in self.parts else 0

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of the unit of `token_places`: the smallest item size of the parts."""
        return min(view.itemsize for view in self.parts.values())

    def token_places(self) -> Tensor:
        """Return the places in the page of the units of each token, for all parts and heads, [page, units] int32."""
        return _token_places(self.format, self.num_heads, self.page_size, self.head_dim, self.slab.device)

    def write(self, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token per row; see `KVFormat.write`."""
        self.format.write(self.parts, pages, slots, keys, values)

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages, fp32; see `KVFormat.read`."""
        return self.format.read(self.parts, pages, self.head_dim)


@cache
def _token_places(kv_format: KVFormat, heads: int, page_size: int, head_dim: int, device: torch.device) -> Tensor:
    unit = min(ITEM_BYTES[part.dtype] for part in kv_format.parts)
    page, slots, found = torch.zeros(page_size, dtype=torch.int64), torch.arange(page_size), []
    for part, offset in zip(kv_format.parts, kv_format.offsets(heads, head_dim, page_size), strict=False):
        size = ITEM_BYTES[part.dtype]
        shape = (1, heads, *part.shape(head_dim, page_size))
        items = torch.arange(math.prod(shape)).view(shape)[part.at(page, slots)].flatten(1)
        units = offset + size * items[..., None] + unit * torch.arange(size // unit)
        found.append(units.flatten(1) // unit)
    return torch.cat(found, dim=1).to(device, torch.int32)


def layer_bytes(layers: Sequence[KvPages]) -> int:
    """Return the distance in bytes between the layers of a pool; 0 for one layer.

    Raises:
        KernelArgumentError: the layers differ in format or size, or are not equally far apart.
    """
    starts = [kv.slab.data_ptr() for kv in layers]
    distances = {after - before for before, after in pairwise(starts)}
    alike = {(kv.format.name, kv.slab.shape, kv.num_heads, kv.page_size, kv.head_dim) for kv in layers}
    if len(distances) > 1 or len(alike) > 1:
        raise KernelArgumentError("layers must be those of one pool, in order")
    return distances.pop() if distances else 0
