"""Argument checks of ops; each raises KernelArgumentError. What needs the backend or the device is in `ops.py`."""

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import AttentionPlan, SgmvPlan
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.layout import MAX_SLICES, PlacedAdapter
from sgmv_kernels.segments import BASE, Segments

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_gated(gate_up: Tensor) -> None:
    """Raises KernelArgumentError: not two halves of a contiguous row."""
    if gate_up.dim() != 2 or not gate_up.is_contiguous() or gate_up.shape[1] % 2:
        raise KernelArgumentError("gate_up must be contiguous [T, 2F]")


def check_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int) -> None:
    """Raises KernelArgumentError: weights that are not one head wide, or rows that are no number of such heads."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        fits = weight.shape == q_weight.shape and weight.dim() == 1 and weight.dtype == torch.float32
        if not fits or not weight.is_contiguous():
            raise KernelArgumentError(f"{name} must be contiguous float32 [D]")
    if qkv.dim() != 2 or not qkv.is_contiguous():
        raise KernelArgumentError("qkv must be contiguous [T, width]")
    heads, rest = divmod(qkv.shape[1], len(q_weight))
    if rest or heads <= 2 * kv_heads:
        raise KernelArgumentError(f"qkv has {qkv.shape[1]} columns, which is no number of heads")


def site_dims(plan: SgmvPlan, layer: int, site: int) -> tuple[int, int]:
    """(inputs, outputs) of a site; any of a plan without adapters."""
    if not plan.tables.num_segments:
        return 0, 0
    if not 0 <= layer < len(plan.tables.records) or not 0 <= site < len(plan.tables.sites):
        layers, sites = plan.tables.records.shape[:2]
        raise KernelArgumentError(f"layer {layer}, site {site}: the adapters have {layers} layers, {sites} sites")
    found = plan.tables.sites[site]
    return found.in_features, found.total_out


def check_segments(segments: Segments) -> None:
    arrays = (segments.permutation, segments.indptr, segments.adapters)
    require(all(a.dtype == np.int32 and a.ndim == 1 for a in arrays), "segments must be int32 arrays of one dimension")
    indptr, rows = segments.indptr, segments.num_rows
    whole = len(indptr) == len(segments) + 1 and indptr[0] == 0 and indptr[-1] == rows and (np.diff(indptr) >= 0).all()
    require(whole, "segments.indptr must rise from 0 to the number of rows")
    inside = not rows or (int(segments.permutation.min()) >= 0 and int(segments.permutation.max()) < rows)
    once = inside and bool((np.bincount(segments.permutation, minlength=rows) == 1).all())
    require(once, "segments.permutation must hold every row once: segments overlap or leave rows out")
    require((segments.adapters >= BASE).all(), "segments.adapters must be indices, or BASE")


def check_adapter(adapter: PlacedAdapter, first: PlacedAdapter, dtype: torch.dtype) -> None:
    layout = adapter.layout
    require(layout.itemsize == dtype.itemsize, "adapters must be packed in the pool's adapter dtype")
    require(layout.sites == first.layout.sites, "adapters must be made for the same sites")
    require(layout.num_layers == first.layout.num_layers, "adapters must have the same layers")
    require(layout.max_slices <= MAX_SLICES, f"a site of an adapter has over {MAX_SLICES} slices")
    try:
        require(len(adapter.panels) == 0 or adapter.extent[0] >= 0, "adapters must have panels inside the pool")
    except ValueError as error:
        raise KernelArgumentError(f"adapters: {error}") from error


def check_pages(kv: KvPages, plan: AttentionPlan) -> None:
    if plan.page_size != kv.page_size:
        raise KernelArgumentError(f"plan is for pages of {plan.page_size} tokens, not {kv.page_size}")
    if plan.num_pages > kv.num_pages:
        raise KernelArgumentError(f"plan is for {plan.num_pages} pages, but there are {kv.num_pages}")
    require(kv.dtype in FLOATS and kv.values.dtype == kv.dtype, "keys and values must have one dtype of 16 or 32 bits")
    shape = (kv.num_pages, kv.num_heads, kv.page_size, kv.head_dim)
    require(kv.values.shape == shape, "values must have the pages, heads, tokens and dims of the keys")
    per_head = kv.head_dim * kv.page_size
    keys, values = kv.keys.stride(), kv.values.stride()
    dense = keys[1:] == (per_head, kv.page_size, 1) and values[1:] == (per_head, kv.head_dim, 1)
    if not dense or keys[0] != values[0]:
        raise KernelArgumentError("keys and values must be dense inside their pages, and pages equally far apart")


def require(holds: object, message: str) -> None:
    if not holds:
        raise KernelArgumentError(message)
