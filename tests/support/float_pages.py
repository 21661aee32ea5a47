"""Slabs of bytes as pages of float keys and values, for tests of kernels."""

import torch

from sgmv_kernels.formats.kv_format import KV_FORMATS, KVFormat
from sgmv_kernels.formats.kv_pages import KvPages


def float_format(dtype: torch.dtype) -> KVFormat:
    """Return the KV format of a float dtype."""
    return KV_FORMATS[str(dtype).removeprefix("torch.")]


def float_pages(slab: torch.Tensor, dtype: torch.dtype, heads: int, page_size: int, head_dim: int) -> KvPages:
    """View a slab, [bytes] uint8, as pages of floats."""
    return KvPages(slab, float_format(dtype), heads, page_size, head_dim)
