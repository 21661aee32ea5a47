"""The ops between the linears in plain torch: norms, rotation, gates."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.formats.kv_pages import KvPages


def rope_write_kv_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor, kv_heads: int
) -> Tensor:
    """See `ops.Ops.rope_write_kv`, and `rope_queries` for no key heads."""
    heads = qkv.view(len(qkv), -1, kv.head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if kv_heads:
        kv.write(pages, slots, _rotated(k, cos, sin), v)
    return _rotated(q, cos, sin)


def add_torch_(x: Tensor, delta: Tensor) -> None:
    """See `ops.Ops.add_`."""
    x.add_(delta)


def add_rms_norm_torch_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def add_layer_norm_torch_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_layer_norm_`."""
    if delta is not None:
        x.add_(delta)
    return F.layer_norm(x.float(), (x.shape[-1],), weight, None, eps).to(x.dtype)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul_torch(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_torch(x: Tensor) -> Tensor:
    """See `ops.Ops.gelu`."""
    return F.gelu(x)


def norm_heads_torch_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int, eps: float) -> None:
    """See `ops.Ops.norm_heads_`."""
    width = kv_heads * len(k_weight)
    q, k, _ = torch.split(qkv, [qkv.shape[1] - 2 * width, width, width], dim=1)
    for part, weight in ((q, q_weight), (k, k_weight)):
        heads = part.view(len(part), part.shape[1] // len(weight), len(weight))
        heads.copy_(F.rms_norm(heads.float(), weight.shape, weight, eps))


def softcap_torch_(x: Tensor, cap: float) -> None:
    """See `ops.Ops.softcap_`."""
    x.div_(cap).tanh_().mul_(cap)


def likeliest_torch(logits: Tensor) -> Tensor:
    """See `ops.Ops.likeliest`."""
    # On a CPU numpy's: torch would wake all threads for a few microseconds.
    if logits.device.type == "cpu":
        with np.errstate(invalid="ignore", over="ignore"):
            best, sums = (torch.from_numpy(getattr(logits.numpy(), name)(axis=-1)) for name in ("argmax", "sum"))
    else:
        best, sums = logits.argmax(dim=-1), logits.sum(dim=-1)
    return torch.where(sums.isfinite(), best, NO_TOKEN)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s, rest), dim=-1).to(x.dtype)
