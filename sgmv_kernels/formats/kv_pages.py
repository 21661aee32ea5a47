"""One layer of the pool seen as keys and values.

Keys are stored transposed inside their page, so that a vector holds one dimension of neighbouring tokens: the scores of
a page come out as vectors, without horizontal sums, and one loaded key serves every query head of its group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KV = 2


@dataclass(frozen=True, slots=True)
class KvPages:
    """keys [P, kv_heads, D, page], values [P, kv_heads, page, D], bf16, fp16 or fp32: views of the same pages.

    A page's keys come first, then its values, both dense.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_pages(self) -> int:
        return self.keys.shape[0]

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def page_size(self) -> int:
        return self.keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype


def kv_pages(slab: Tensor, dtype: torch.dtype, heads: int, page_size: int, head_dim: int) -> KvPages:
    """View a layer's slab, [pages * page bytes] uint8, as pages of `page_size` tokens."""
    numbers = slab.view(dtype)
    keys = numbers.view(-1, KV, heads, head_dim, page_size)[:, 0]
    return KvPages(keys, numbers.view(-1, KV, heads, page_size, head_dim)[:, 1])
