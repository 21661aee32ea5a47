"""Sequences of queries, keys and values for tests of attention, with NaN in every slot that no token owns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from float_pages import float_pages
from kernel_pools import pages_on

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import Parents
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference

FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
CLOSE: dict[torch.dtype, dict[str, Any]] = {
    FLOAT: {"rtol": 1e-4, "atol": 1e-5},
    HALF: {"rtol": 2e-2, "atol": 2e-2},
    BF16: {"rtol": 2e-2, "atol": 2e-2},
}
CPU_HEADS = [(9, 3, 64), (4, 4, 32), (8, 1, 80), (4, 2, 96), (7, 1, 128), (2, 1, 256)]
GPU_HEADS = [(9, 3, 64), (2, 2, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256), (18, 1, 16)]
"""(query heads, key heads, numbers of a head)."""


@dataclass
class Case:
    """Hold sequences over pages in random order."""

    q: torch.Tensor
    kv: KvPages
    tables: np.ndarray
    query_lens: list[int]
    kv_lens: list[int]
    # Draft trees, as in `Ops.plan_attention`.
    parents: list[Parents] = field(default_factory=list)
    # Of ALiBi, for every query head.
    slopes: torch.Tensor | None = None

    def q_of(self, order: list[int], device: torch.device) -> torch.Tensor:
        parts = torch.split(self.q, self.query_lens)
        return torch.cat([parts[i] for i in order]).to(device)

    def attend(
        self,
        ops: Ops,
        scale: float = 0.125,
        window: int | None = None,
        softcap: float | None = None,
        order: list[int] | None = None,
        **lens: list[int],
    ) -> torch.Tensor:
        """Compute attention with the kernels, for the sequences in `order`."""
        order = list(range(len(self.kv_lens))) if order is None else order
        given: dict[str, Any] = {
            "query_lens": [self.query_lens[i] for i in order],
            "kv_lens": [self.kv_lens[i] for i in order],
            "parents": [self.parents[i] for i in order] if self.parents else [],
            **lens,
        }
        plan = ops.plan_attention(self.tables[order], **given, page_size=self.kv.page_size, num_pages=self.kv.num_pages)
        q = self.q_of(order, ops.device)
        slopes = None if self.slopes is None else self.slopes.to(ops.device)
        return ops.paged_attention(
            q, pages_on(self.kv, ops.device), plan, Scoring(scale, window, softcap, slopes)
        ).cpu()

    def reference(self, scale: float, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        tables = [row[: -(-n // self.kv.page_size)].tolist() for row, n in zip(self.tables, self.kv_lens, strict=True)]
        args = (self.q, self.kv.keys, self.kv.values, tables, self.query_lens, self.kv_lens)
        return paged_attention_reference(*args, Scoring(scale, window, softcap, self.slopes), self.parents)

    def check(
        self,
        ops: Ops,
        scale: float = 0.125,
        window: int | None = None,
        softcap: float | None = None,
        **close: float,
    ) -> torch.Tensor:
        """Return the result of the kernels, after comparing it with the reference."""
        got = self.attend(ops, scale, window, softcap)
        want = self.reference(scale, window, softcap)
        torch.testing.assert_close(got.float(), want, check_dtype=False, **(CLOSE[self.q.dtype] | close))
        return got


def make_case(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = FLOAT,
    page: int = 16,
    active: torch.dtype = FLOAT,
) -> Case:
    counts = [-(-n // page) for n in kv_lens]
    order = torch.randperm(sum(counts) + 5).tolist()
    slab = torch.full((len(order) * 2 * kv_heads * page * dim * dtype.itemsize,), 0xFF, dtype=torch.uint8)
    kv = float_pages(slab, dtype, kv_heads, page, dim)
    tables = np.full((len(counts), max(counts)), 1 << 20, dtype=np.int32)  # entries past a sequence name no page
    for row, n, length in zip(tables, counts, kv_lens, strict=True):
        row[:n] = [order.pop() for _ in range(n)]
        for i, p in enumerate(row[:n].tolist()):
            used = min(page, length - i * page)
            kv.keys[p, :, :, :used] = torch.randn(kv_heads, dim, used).to(dtype)
            kv.values[p, :, :used] = torch.randn(kv_heads, used, dim).to(dtype)
    return Case(torch.randn(sum(query_lens), heads, dim).to(active), kv, tables, list(query_lens), list(kv_lens))
