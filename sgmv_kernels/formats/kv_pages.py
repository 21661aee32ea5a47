"""View the pages in which one layer of the pool stores keys and values as tensors."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KEYS, VALUES, KVFormat


class KvPages:
    """View a layer of the pool as P pages of keys and values.

    Args:
        slab: [P * page bytes] uint8, contiguous; the views below share its memory.
        kv_format: layout of a page.
        heads: key heads.
        page_size: tokens of a page.
        head_dim: D, numbers of a head.
    Attributes:
        parts: views [P, heads, *shape of a head's block] by the names of the format's parts; `keys` and `values` are
            two of
            them.
    Raises:
        KernelArgumentError: the slab is not a whole number of pages, or not contiguous bytes.
    """

    def __init__(self, slab: Tensor, kv_format: KVFormat, heads: int, page_size: int, head_dim: int) -> None:
        *offsets, page_bytes = kv_format.offsets(heads, head_dim, page_size)
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

    def write(self, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token per row; see `KVFormat.write`."""
        self.format.write(self.parts, pages, slots, keys, values)

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages, fp32; see `KVFormat.read`."""
        return self.format.read(self.parts, pages)


def layer_bytes(layers: Sequence[KvPages]) -> int:
    """Return the bytes from each layer of a pool to the next, 0 for one layer.

    Raises:
        KernelArgumentError: the layers are not alike, or not equally far apart.
    """
    starts = [kv.slab.data_ptr() for kv in layers]
    distances = {after - before for before, after in pairwise(starts)}
    alike = {(kv.format.name, kv.slab.shape, kv.num_heads, kv.page_size, kv.head_dim) for kv in layers}
    if len(distances) > 1 or len(alike) > 1:
        raise KernelArgumentError("layers must be those of one pool, in order")
    return distances.pop() if distances else 0
