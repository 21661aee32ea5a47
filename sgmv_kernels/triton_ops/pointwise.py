"""The ops between the linears on a GPU: one kernel for each op, sums in fp32, one rounding at the end.

A row's result does not depend on the rows beside it. Speed on a GPU is NOT MEASURED yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.formats.kv_format import CodesKV
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.triton_ops.common import cast, finite, is_finite, kernel, power_of_two, softened
from sgmv_kernels.triton_ops.kv_codes import rope_write_codes

SILU_BLOCK = 1024
ROPE_ROWS = 16
"""Token rows of a program at prefill: neighbouring tokens share the 32-byte sectors of a transposed page."""


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor, kv_heads: int
) -> Tensor:
    """See `ops.Ops.rope_write_kv`, and `rope_queries` for no key heads."""
    if isinstance(kv.format, CodesKV):
        return rope_write_codes(qkv, cos, sin, kv, pages, slots, kv_heads)
    rows, dim = len(qkv), kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if rows:
        block_t = min(ROPE_ROWS, power_of_two(rows, 1))
        _rope_write_kernel[(triton.cdiv(rows, block_t), heads + 2 * kv_heads)](
            qkv,
            cos,
            sin,
            kv.keys,
            kv.values,
            pages,
            slots,
            q,
            rows,
            *kv.keys.stride(),
            *kv.values.stride(),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=cos.shape[1],
            HALF_PAD=power_of_two(cos.shape[1], 1),
            DIM=dim,
            REST_PAD=power_of_two(max(1, dim - 2 * cos.shape[1]), 1),
            BLOCK_T=block_t,
            num_warps=1 if block_t == 1 else 4,
        )
    return q


def add_rms_norm_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    return _normed(x, delta, weight, eps, centered=False)


def add_layer_norm_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_layer_norm_`."""
    return _normed(x, delta, weight, eps, centered=True)


def _normed(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, centered: bool) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        block = power_of_two(width)
        _add_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            eps,
            WIDTH=width,
            ADD=delta is not None,
            CENTERED=centered,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        block = min(SILU_BLOCK, power_of_two(width))
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.gelu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        block = min(SILU_BLOCK, power_of_two(width))
        _gelu_mul_kernel[(rows, triton.cdiv(width, block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def gelu(x: Tensor) -> Tensor:
    """See `ops.Ops.gelu`."""
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows and width:
        block = min(SILU_BLOCK, power_of_two(width))
        _gelu_kernel[(rows, triton.cdiv(width, block))](x, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def norm_heads_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int, eps: float) -> None:
    """See `ops.Ops.norm_heads_`."""
    rows, q_dim, k_dim = len(qkv), len(q_weight), len(k_weight)
    heads = (qkv.shape[1] - 2 * kv_heads * k_dim) // q_dim
    if rows:
        block = power_of_two(max(q_dim, k_dim), 1)
        _norm_heads_kernel[(rows, heads + kv_heads)](
            qkv,
            q_weight,
            k_weight,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            Q_DIM=q_dim,
            K_DIM=k_dim,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


def softcap_(x: Tensor, cap: float) -> None:
    """See `ops.Ops.softcap_`."""
    rows, width = x.shape
    if rows and width:
        block = min(SILU_BLOCK, power_of_two(width))
        _softcap_kernel[(rows, triton.cdiv(width, block))](x, cap, width, BLOCK=block, num_warps=4)


@kernel("rows", unaligned=("pages", "slots"))
def _rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    keys,
    values,
    pages,
    slots,
    q,
    rows,
    key_page,
    key_head,
    key_dim,
    key_slot,
    value_page,
    value_head,
    value_slot,
    value_dim,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    DIM: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rotate or store one head, of q, k or v, of BLOCK_T token rows."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, HALF_PAD)
    head = tl.program_id(1)
    ok = (t < rows)[:, None] & (d < HALF)[None, :]
    row = qkv + (t * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM
    source = row + d[None, :]
    x1 = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    page = tl.load(pages + t, mask=t < rows, other=0)
    slot = tl.load(slots + t, mask=t < rows, other=0)
    is_held = t < rows  # see `kv_format.held`
    if (head >= HEADS) & (head < HEADS + KV_HEADS):
        value = qkv + (t * (HEADS + 2 * KV_HEADS) + head + KV_HEADS)[:, None] * DIM
        part: tl.constexpr = max(HALF_PAD, REST_PAD)
        for first in tl.static_range(0, DIM, part):
            n = first + tl.arange(0, part)[None, :]
            numbers = tl.load(value + n, mask=(t < rows)[:, None] & (n < DIM), other=0.0).to(tl.float32)
            is_each = is_finite(numbers) & is_finite(cast(numbers, values.dtype.element_ty))
            is_held = is_held & (tl.min(is_each.to(tl.int32), 1) > 0)
    if head >= HEADS + KV_HEADS:
        value_row = values + (page * value_page + (head - HEADS - KV_HEADS) * value_head + slot * value_slot)[:, None]
        tl.store(value_row + d[None, :] * value_dim, finite(cast(finite(x1), values.dtype.element_ty)), mask=ok)
        tl.store(
            value_row + (d + HALF)[None, :] * value_dim, finite(cast(finite(x2), values.dtype.element_ty)), mask=ok
        )
    else:
        angle = t[:, None] * HALF + d[None, :]
        c, s = tl.load(cos + angle, mask=ok, other=0.0), tl.load(sin + angle, mask=ok, other=0.0)
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        if head < HEADS:
            q_row = q + (t * HEADS + head)[:, None] * DIM
            tl.store(q_row + d[None, :], cast(y1, q.dtype.element_ty), mask=ok)
            tl.store(q_row + (d + HALF)[None, :], cast(y2, q.dtype.element_ty), mask=ok)
        else:
            y1 = tl.where(is_held[:, None] & is_finite(cast(y1, keys.dtype.element_ty)), y1, float("nan"))
            y2 = tl.where(is_held[:, None] & is_finite(cast(y2, keys.dtype.element_ty)), y2, float("nan"))
            # Transposed, so that neighbouring threads write neighbouring slots of a transposed page.
            turned = tl.trans(ok)
            place = keys + (page * key_page + (head - HEADS) * key_head + slot * key_slot)[None, :]
            tl.store(place + d[:, None] * key_dim, cast(tl.trans(y1), keys.dtype.element_ty), mask=turned)
            tl.store(place + (d + HALF)[:, None] * key_dim, cast(tl.trans(y2), keys.dtype.element_ty), mask=turned)
    if DIM > 2 * HALF:
        # Dimensions without rotation (partial rotary embedding) are stored with their head.
        e = 2 * HALF + tl.arange(0, REST_PAD)
        ok = (t < rows)[:, None] & (e < DIM)[None, :]
        rest = tl.load(row + e[None, :], mask=ok, other=0.0).to(tl.float32)
        if head >= HEADS + KV_HEADS:
            value_row = (
                values + (page * value_page + (head - HEADS - KV_HEADS) * value_head + slot * value_slot)[:, None]
            )
            tl.store(value_row + e[None, :] * value_dim, finite(cast(finite(rest), values.dtype.element_ty)), mask=ok)
        elif head < HEADS:
            q_row = q + (t * HEADS + head)[:, None] * DIM
            tl.store(q_row + e[None, :], cast(rest, q.dtype.element_ty), mask=ok)
        else:
            rest = tl.where(is_held[:, None] & is_finite(cast(rest, keys.dtype.element_ty)), rest, float("nan"))
            key_row = keys + (page * key_page + (head - HEADS) * key_head + slot * key_slot)[:, None]
            tl.store(key_row + e[None, :] * key_dim, cast(rest, keys.dtype.element_ty), mask=ok)


@kernel()
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row: x += delta, rounded to x's dtype, then the norm of what was stored, or of that less its mean."""
    column = tl.arange(0, BLOCK)
    ok = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    total = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        stored = cast(total + tl.load(delta + at, mask=ok, other=0.0).to(tl.float32), x.dtype.element_ty)
        tl.store(x + at, stored, mask=ok)
        total = stored.to(tl.float32)
    if CENTERED:
        total = tl.where(ok, total - tl.sum(total, 0) / WIDTH, 0.0)
    mean = tl.sum(total * total, 0) / WIDTH
    normed = total * tl.rsqrt(mean + eps) * tl.load(weight + column, mask=ok, other=0.0)
    tl.store(out + at, cast(normed, out.dtype.element_ty), mask=ok)


@kernel()
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate columns of one row. The exponential never overflows: its argument is never positive."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=ok, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * WIDTH + column, cast(gate * sigmoid * up, out.dtype.element_ty), mask=ok)


@kernel()
def _gelu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate columns of one row; 0.5 (1 + tanh z) is the sigmoid of 2 z, as in `_silu_mul_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=ok, other=0.0).to(tl.float32)
    z = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    small = tl.exp(-tl.abs(z))
    sigmoid = tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * WIDTH + column, cast(gate * sigmoid * up, out.dtype.element_ty), mask=ok)


@kernel()
def _gelu_kernel(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply GELU to columns of one row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + at, mask=column < WIDTH, other=0.0).to(tl.float32)
    gated = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + at, cast(gated, out.dtype.element_ty), mask=column < WIDTH)


@kernel()
def _norm_heads_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_DIM: tl.constexpr,
    K_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm one head of q or k of one row."""
    head, column = tl.program_id(1), tl.arange(0, BLOCK)
    dim = tl.where(head < HEADS, Q_DIM, K_DIM)
    start = tl.minimum(head, HEADS) * Q_DIM + tl.maximum(head - HEADS, 0) * K_DIM
    at = tl.program_id(0).to(tl.int64) * (HEADS * Q_DIM + 2 * KV_HEADS * K_DIM) + start + column
    ok = column < dim
    if head < HEADS:
        weight = tl.load(q_weight + column, mask=ok, other=0.0)
    else:
        weight = tl.load(k_weight + column, mask=ok, other=0.0)
    x = tl.load(qkv + at, mask=ok, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps) * weight
    tl.store(qkv + at, cast(normed, qkv.dtype.element_ty), mask=ok)


@kernel("width")
def _softcap_kernel(x, cap, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bound columns of one row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(x + at, cast(softened(value, cap), x.dtype.element_ty), mask=column < width)
