"""Public ops: argument checks and dispatch by device. For arithmetic, others import this module and no other.

Shapes: T token rows, S segments, R rank rows, P pages, B sequences, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.attention_torch import AttentionPlan, paged_attention_torch, plan_attention_torch
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.layout import PlacedAdapter
from sgmv_kernels.segments import BASE, Segments
from sgmv_kernels.sgmv_torch import sgmv_torch

__all__ = [
    "AttentionPlan",
    "KernelArgumentError",
    "SgmvPlan",
    "paged_attention",
    "plan_attention",
    "plan_sgmv",
    "rms_norm",
    "rope_",
    "sgmv",
    "silu_mul",
    "write_kv",
]


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    """A step's rows and adapters, checked once for all layers and sites. See `plan_sgmv`."""

    segments: Segments
    adapters: tuple[PlacedAdapter, ...]
    dtype: torch.dtype


def plan_sgmv(segments: Segments, adapters: Sequence[PlacedAdapter], dtype: torch.dtype) -> SgmvPlan:
    """Check what is the same for every `sgmv` of a step.

    Args:
        segments: rows by adapter; `segments.adapters` index into `adapters`.
        adapters: the placed adapters of this step, ranks mixed freely.
        dtype: how panels are stored, bfloat16 or float32.
    Raises:
        KernelArgumentError: an index, dtype or site does not fit.
    """
    _require(dtype in (torch.bfloat16, torch.float32), f"dtype {dtype} of panels must be bfloat16 or float32")
    highest = int(segments.adapters.max(initial=BASE))
    _require(highest < len(adapters), f"segments name adapter {highest}, but there are {len(adapters)}")
    for adapter in adapters:
        _require(adapter.layout.itemsize == dtype.itemsize, "adapters must be packed in the pool's adapter dtype")
        _require(adapter.layout.sites == adapters[0].layout.sites, "adapters must be made for the same sites")
    return SgmvPlan(segments, tuple(adapters), dtype)


def sgmv(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """Add every row's own adapter delta to the output of a base linear, in place.

    Semantics: y[t, slice] += (scale * (x[t] @ A^T))[slice's ranks] @ B[slice], A and B of row t's adapter, if any

    Args:
        y: [T, sum of slice widths] fp32, the base linear's output; written in place.
        x: [T, in] fp32, its input.
        slab: [bytes] uint8, one layer of the pool.
        plan: the step's rows and adapters.
        layer, site: which panels to read.
    Raises:
        KernelArgumentError: a shape or dtype does not fit; nothing has been written.
    Source: SGMV of Punica (Chen et al. 2023), true ranks and pages shared with KV after S-LoRA (Sheng et al. 2023).
    """
    _require(x.dtype == torch.float32 and y.dtype == torch.float32, "x and y must be float32")
    _require(slab.dtype == torch.uint8 and slab.dim() == 1, "slab must be one-dimensional uint8")
    _require(x.shape[0] == y.shape[0] == plan.segments.num_rows, "x, y and the plan must have the same rows")
    if not plan.adapters:
        return
    dims = plan.adapters[0].layout.sites[site]
    _require(x.shape[1] == dims.in_features, f"x has {x.shape[1]} columns, site {site} takes {dims.in_features}")
    _require(y.shape[1] == dims.total_out, f"y has {y.shape[1]} columns, site {site} gives {dims.total_out}")
    sgmv_torch(y, x, slab, plan.dtype, plan.segments, plan.adapters, layer, site)


def plan_attention(
    page_tables: npt.NDArray[np.int32],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    num_pages: int,
) -> AttentionPlan:
    """Check a step's sequences and lay them out, once for all layers.

    Args:
        page_tables: [B, max pages] int32 page ids in order; entries past a sequence's pages are ignored.
        query_lens: rows of each sequence; they are its last positions.
        kv_lens: keys of each sequence, this step's included.
        page_size: tokens a page.
        num_pages: pages of the pool.
    Raises:
        KernelArgumentError: lengths that contradict each other, or a page id outside the pool.
    """
    for table, n, length in zip(page_tables, query_lens, kv_lens, strict=True):
        _require(0 < n <= length, f"query_lens {n} must be positive and at most kv_lens {length}")
        used = table[: -(-length // page_size)]
        _require(len(used) * page_size >= length, f"page_tables too short for {length} tokens")
        _require(used.min() >= 0 and used.max() < num_pages, "page_tables name a page outside the pool")
    return plan_attention_torch(page_tables, query_lens, kv_lens, page_size)


def paged_attention(
    q: Tensor, kv_pages: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of prefill chunks and single-token decodes in one call, over paged keys and values.

    Semantics: out[t] = softmax(scale * q[t] . K[:pos(t) + 1]) V[:pos(t) + 1], the last `window` keys only where given;
    query head h reads key head h // (heads / kv_heads)

    Args:
        q: [T, heads, D] fp32; the rows of sequence i follow those of i - 1.
        kv_pages: [P, 2, kv_heads, page, D] bf16 or fp32, keys then values of one layer.
        plan: the step's sequences.
    Returns: [T, heads, D] fp32.
    Raises:
        KernelArgumentError: shapes that do not fit.
    Source: paged KV of vLLM (Kwon et al. 2023).
    """
    _require(q.dtype == torch.float32 and q.dim() == 3, "q must be float32 [T, heads, D]")
    _require(q.shape[1] % kv_pages.shape[2] == 0, "query heads must be a multiple of key heads")
    _require(plan.num_rows == q.shape[0], "query_lens must sum to the rows of q")
    return paged_attention_torch(q, kv_pages, plan, scale, window)


def write_kv(k: Tensor, v: Tensor, kv_pages: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Store this step's keys and values. k, v [T, kv_heads, D]; row t goes to slot `slots[t]` of page `pages[t]`.

    Semantics: kv_pages[pages[t], 0, :, slots[t]] = k[t]; kv_pages[pages[t], 1, :, slots[t]] = v[t]
    """
    kv_pages[pages, 0, :, slots] = k.to(kv_pages.dtype)
    kv_pages[pages, 1, :, slots] = v.to(kv_pages.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Semantics: x / sqrt(mean(x^2) + eps) * weight. x [T, H] fp32, weight [H] fp32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in place, Hugging Face's half-split order. x [T, heads, D] fp32; cos, sin [T, 1, D / 2] fp32.

    Semantics: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    rotated = x1 * cos - x2 * sin
    x[..., half:] = x2 * cos + x1 * sin
    x[..., :half] = rotated
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """Semantics: silu(gate) * up, gate and up the halves of the last dimension. gate_up [T, 2F] -> [T, F], fp32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise KernelArgumentError(message)
