"""Check the arguments of ops. Every check raises KernelArgumentError.

Checks that need the backend are methods of the ops, such as `backend_ops.BackendOps`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import MAX_SLICES, PlacedAdapter
from sgmv_kernels.formats.kv_pages import KvPages, layer_bytes
from sgmv_kernels.metadata.draft_trees import MAX_SLOTS, ROOT, Parents
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses, SgmvPlan
from sgmv_kernels.metadata.segments import BASE, Int32, Segments

_SLAB = "slab must be contiguous one-dimensional uint8"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_gated(gate_up: Tensor) -> None:
    """Check that rows are contiguous and have two halves."""
    if gate_up.dim() != 2 or not gate_up.is_contiguous() or gate_up.shape[1] % 2:
        raise KernelArgumentError("gate_up must be contiguous [T, 2F]")


def check_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int) -> None:
    """Check that rows consist of whole heads, which are as wide as the norm weights."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dim() != 1 or weight.dtype != torch.float32 or not weight.is_contiguous() or not len(weight):
            raise KernelArgumentError(f"{name} must be contiguous float32 of one dimension")
    if qkv.dim() != 2 or not qkv.is_contiguous():
        raise KernelArgumentError("qkv must be contiguous [T, width]")
    heads, rest = divmod(qkv.shape[1] - 2 * kv_heads * len(k_weight), len(q_weight))
    if rest or heads < 1:
        raise KernelArgumentError(f"qkv has {qkv.shape[1]} columns, which is no number of heads")


def site_dims(plan: SgmvPlan, layer: int, site: int) -> tuple[int, int]:
    """Return (inputs, outputs) of a site; zeros for a plan without adapters."""
    if not plan.tables.num_segments:
        return 0, 0
    if not 0 <= layer < len(plan.tables.records) or not 0 <= site < len(plan.tables.sites):
        layers, sites = plan.tables.records.shape[:2]
        raise KernelArgumentError(f"layer {layer}, site {site}: the adapters have {layers} layers, {sites} sites")
    found = plan.tables.sites[site]
    return found.in_features, found.total_out


def check_segments(segments: Segments) -> None:
    """Check that segments contain every row exactly once."""
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
    """Check that an adapter is packed in `dtype` or int8, for the sites and layers of the first, and lies inside the
    pool.
    """
    layout = adapter.layout
    is_packed = layout.are_codes or layout.itemsize == dtype.itemsize
    require(is_packed, "adapters must be packed in the pool's adapter dtype, or int8")
    require(layout.sites == first.layout.sites, "adapters must be made for the same sites")
    require(layout.num_layers == first.layout.num_layers, "adapters must have the same layers")
    fits = layout.vectors == () or first.layout.vectors == () or layout.places == first.layout.places
    require(fits, "adapters with vectors must be made for the same places")
    require(layout.max_slices <= MAX_SLICES, f"a site of an adapter has over {MAX_SLICES} slices")
    try:
        require(len(adapter.panels) == 0 or adapter.extent[0] >= 0, "adapters must have panels inside the pool")
    except ValueError as error:
        raise KernelArgumentError(f"adapters: {error}") from error


def check_pages(kv: KvPages, plan: AttentionPlan) -> None:
    """Check that the pages fit the plan: they have its page size, and are at least as many as it needs."""
    if plan.page_size != kv.page_size:
        raise KernelArgumentError(f"plan is for pages of {plan.page_size} tokens, not {kv.page_size}")
    if plan.num_pages > kv.num_pages:
        raise KernelArgumentError(f"plan is for {plan.num_pages} pages, but there are {kv.num_pages}")


def check_masses(masses: PageMasses | None, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> None:
    """Check that masses have a row for every key head and observed row, as wide as the page tables."""
    if masses is None:
        return
    require(scoring.window is None and scoring.slopes is None, "masses go with neither window nor slopes")
    fits = masses.counts.shape == plan.kv_lens.shape and bool((masses.counts <= np.diff(plan.query_starts)).all())
    require(fits, "masses.counts must be at most the rows of each sequence")
    shape = kv.num_heads, int(masses.counts.sum()), plan.page_tables.shape[1]
    fits = masses.sums.dtype == torch.float32 and masses.sums.shape == shape and masses.sums.is_contiguous()
    require(fits, f"masses.sums must be contiguous fp32 {list(shape)}")
    # CPU kernels compute attention weights in blocks of 32 keys.
    require(32 % plan.page_size == 0, f"masses need pages of a divisor of 32 tokens, not {plan.page_size}")


def check_sequences(
    page_tables: Int32, query_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, num_pages: int
) -> None:
    """Check lengths against each other, and page ids against the pool."""
    require(page_tables.dtype == np.int32 and page_tables.ndim == 2, "page_tables must be int32 [B, pages]")
    same = len(page_tables) == len(query_lens) == len(kv_lens)
    require(same, "page_tables, query_lens and kv_lens must have one entry a sequence")
    require(page_size > 0, f"page_size must be positive, not {page_size}")
    wrong = [(n, length) for n, length in zip(query_lens, kv_lens, strict=True) if not 0 < n <= length]
    require(not wrong, f"query_lens must be positive and at most kv_lens: {wrong[:4]}")
    longest = max(kv_lens, default=0)
    require(page_tables.shape[1] * page_size >= longest, f"page_tables too short for {longest} tokens")
    # As unsigned numbers, negative ids are very large.
    outside = page_tables.view(np.uint32) >= num_pages
    if outside.any():
        used = np.arange(page_tables.shape[1]) * page_size < np.asarray(kv_lens)[:, None]
        require(not (outside & used).any(), "page_tables name a page outside the pool")


def check_trees(parents: Sequence[Parents], kv_lens: Sequence[int]) -> None:
    """Check draft trees: one per sequence, not too many slots, parents before their children."""
    require(len(parents) == len(kv_lens), "parents must have one entry a sequence")
    for one, length in zip(parents, kv_lens, strict=True):
        require(len(one) <= min(MAX_SLOTS, length), f"a tree of {len(one)} slots: at most {MAX_SLOTS}, and kv_lens")
        ordered = all(ROOT <= parent < slot for slot, parent in enumerate(one))
        require(ordered, f"parents {list(one)} must be -1 or indices of earlier draft tokens")


def check_moves(layers: Sequence[KvPages], moves: Int32) -> None:
    """Check that moves are inside the pages of one pool, and that no move overwrites what a later one reads."""
    layer_bytes(layers)
    require(moves.dtype == np.int32 and moves.ndim == 2 and moves.shape[1] == 4, "moves must be int32 [N, 4]")
    limits = np.tile((layers[0].num_pages, layers[0].page_size), 2)
    require(((moves >= 0) & (moves < limits)).all(), "moves name a page or slot outside the pool")
    read: set[tuple[int, int]] = set()
    for *source, page, slot in reversed(moves.tolist()):
        require((page, slot) not in read, f"page {page}, slot {slot} is overwritten before it is read")
        read.add((source[0], source[1]))


def check_rotated(qkv: Tensor, cos: Tensor, sin: Tensor, dim: int, kv_heads: int) -> None:
    """Check the q/k/v rows [T, width], with `kv_heads` heads of k, and the cosines and sines of their positions."""
    rows = len(qkv)
    require(qkv.dim() == 2 and qkv.is_contiguous(), "qkv must be contiguous [T, width]")
    heads = qkv.shape[1] // dim - 2 * kv_heads
    require(dim % 2 == 0, f"head dim {dim} must be even")
    require(qkv.shape[1] % dim == 0 and heads > 0, f"qkv has {qkv.shape[1]} columns, which is no number of heads")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.shape == (rows, min(cos.shape[-1], dim // 2)) and table.dtype == torch.float32
        require(fits and table.is_contiguous(), f"{name} must be contiguous float32 [{rows}, {dim // 2}] or fewer")


def check_added(x: Tensor, delta: Tensor | None) -> None:
    """Check rows [T, H] of a residual stream, and the delta that is added to them."""
    require(x.dim() == 2 and x.is_contiguous(), "x must be contiguous [T, H]")
    if delta is not None:
        fits = delta.shape == x.shape and delta.dtype == x.dtype and delta.is_contiguous()
        require(fits, "delta must be like x")


def check_normed(x: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Check rows and delta like `check_added`, and the weight of the norm."""
    check_added(x, delta)
    fits = weight.shape == x.shape[1:] and weight.dtype == torch.float32 and weight.is_contiguous()
    require(fits, f"weight must be contiguous float32 [{x.shape[1]}]")


def check_queries(q: Tensor, kv: KvPages, scoring: Scoring) -> None:
    """Check queries [T, heads, D] against the pages, one slope per head, and that window and softcap are positive."""
    require(q.dim() == 3 and q.is_contiguous(), "q must be contiguous [T, heads, D]")
    require(q.shape[1] % kv.num_heads == 0, "query heads must be a multiple of key heads")
    require(q.shape[2] == kv.head_dim, f"q has head dim {q.shape[2]}, the pages have {kv.head_dim}")
    _, window, softcap, slopes = scoring
    require(window is None or window > 0, f"window must be positive, not {window}")
    require(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    if slopes is not None:
        fits = slopes.shape == q.shape[1:2] and slopes.dtype == torch.float32 and slopes.is_contiguous()
        require(fits, f"slopes must be contiguous float32 [{q.shape[1]}]")


def check_slab(slab: Tensor, plan: SgmvPlan, device: torch.device) -> None:
    """Check one layer of the pool: bytes, device, and length."""
    require(slab.dtype == torch.uint8 and slab.dim() == 1 and slab.is_contiguous(), _SLAB)
    require(slab.device.type == device.type, f"slab is on {slab.device}, these kernels are for {device}")
    require(slab.numel() >= plan.tables.slab_bytes, "slab ends before the panels of the plan's adapters do")


def require(holds: object, message: str) -> None:
    """Raise KernelArgumentError with `message` unless `holds`."""
    if not holds:
        raise KernelArgumentError(message)
