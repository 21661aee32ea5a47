"""Reference results for tests and benchmarks: every op in fp32 torch, as a short loop over dense tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.metadata.draft_trees import ROOT, Parents
from sgmv_kernels.metadata.segments import BASE, Segments


@dataclass(frozen=True)
class DenseSlice:
    """Hold a slice of an adapter at one site in PEFT's orientation: lora_a [r, in], lora_b [out, r]."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float


def sgmv_reference(
    y: Tensor, x: Tensor, segments: Segments, adapters: Sequence[Sequence[DenseSlice | None]], outs: Sequence[int]
) -> Tensor:
    """Return y [T, sum(outs)] fp32 plus every row's own delta.

    Semantics: y[t, slice] + scaling * (x[t] @ lora_a^T) @ lora_b^T

    Args:
        x: [T, in].
        adapters: `adapters[i][slice]`, None where adapter i has no weights.
    """
    result = y.float().clone()
    for s in range(len(segments)):
        if segments.adapters[s] == BASE:
            continue
        rows = torch.from_numpy(segments.rows(s)).long()
        start = 0
        for dense, out in zip(adapters[segments.adapters[s]], outs, strict=True):
            if dense is not None:
                delta = x[rows].float() @ dense.lora_a.float().T @ dense.lora_b.float().T
                result[rows, start : start + out] += dense.scaling * delta
            start += out
    return result


def affine_reference(y: Tensor, segments: Segments, vectors: Sequence[tuple[Tensor | None, Tensor | None]]) -> Tensor:
    """Return y [T, width] fp32 with every row's own gain and shift.

    Semantics: gain * y[t] + shift

    Args:
        vectors: gain [width] and shift [width] of each adapter; None for 1 and 0.
    """
    result = y.float().clone()
    for s in range(len(segments)):
        if segments.adapters[s] != BASE:
            gain, shift = vectors[segments.adapters[s]]
            rows = torch.from_numpy(segments.rows(s)).long()
            result[rows] = result[rows] * (1 if gain is None else gain) + (0 if shift is None else shift)
    return result


def paged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scoring: Scoring,
    parents: Sequence[Parents] = (),
) -> Tensor:
    """Compute causal attention of T query rows over paged keys and values, one sequence at a time.

    Semantics: out[t] = softmax(cap(scale * q[t] . K[j]) + slope * (p(j) - p(t)), j seen by t) V; the position p of a
    draft token is that of its depth in the tree; a row sees the keys up to its own, of its
    draft tree only its ancestors and itself, and where given only those of the last `window` positions; cap(s) =
    softcap * tanh(s / softcap), or s

    Args:
        q: [T, heads, D]; the last `query_lens[i]` of `kv_lens[i]` tokens of sequence i are queries.
        keys: [P, kv_heads, D, page].
        values: [P, kv_heads, page, D].
        parents: draft trees as `Ops.plan_attention` takes them.
    Returns: [T, heads, D] fp32.
    """
    out, start = torch.empty_like(q, dtype=torch.float32), 0
    scale, window, softcap, slopes = scoring
    group = q.shape[1] // keys.shape[1]
    trees = parents or [()] * len(kv_lens)
    for table, n, length, tree in zip(page_tables, query_lens, kv_lens, trees, strict=True):
        ids = torch.tensor(list(table))
        k = keys[ids].float().permute(1, 0, 3, 2).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
        v = values[ids].float().transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
        visible = _visible(length, n, tree, window)
        scores = (q[start : start + n].float().transpose(0, 1) @ k.transpose(1, 2)) * scale
        if softcap is not None:
            scores = softcap_reference(scores, softcap)
        if slopes is not None:
            seen = _visible(length, n, tree, None)
            distance = seen.cumsum(-1) - seen.sum(-1, keepdim=True)
            scores = scores + slopes[:, None, None] * distance
        probs = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[start : start + n] = (probs @ v).transpose(0, 1)
        start += n
    return out


def page_mass_reference(
    q: Tensor,
    keys: Tensor,
    page_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    counts: Sequence[int],
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Compute how much attention the last rows of each sequence give to each page.

    Semantics: mass[g, t, p] = sum over the query heads h of key head g and the keys j of page p of softmax(cap(scale *
    q[t, h] . K[g, j]), j up to t)

    Args:
        q, keys, page_tables, query_lens, kv_lens: as `paged_attention_reference`.
        counts: rows of each sequence that are observed.
    Returns: [key heads, sum of counts, most pages of a table] fp32.
    """
    page, group, rows, end = keys.shape[3], q.shape[1] // keys.shape[1], [], 0
    most = max(map(len, page_tables))
    for table, n, length, count in zip(page_tables, query_lens, kv_lens, counts, strict=True):
        end += n
        k = keys[torch.tensor(list(table))].float().permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
        scores = (q[end - count : end].float().transpose(0, 1) @ k.repeat_interleave(group, 0).mT) * scale
        if softcap is not None:
            scores = softcap_reference(scores, softcap)
        probs = scores.masked_fill(~_visible(length, n, (), None)[n - count :], -math.inf).softmax(-1)
        padded = torch.nn.functional.pad(probs, (0, most * page - length))
        rows.append(padded.view(len(k), group, count, most, page).sum((1, -1)))
    return torch.cat(rows, dim=1)


def _visible(length: int, rows: int, parents: Parents, window: int | None) -> Tensor:
    """Return which keys of a sequence its last rows see, bool [rows, length]."""
    last, at = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
    visible = at <= last if window is None else (at <= last) & (at > last - window)
    start = length - len(parents)
    paths: list[list[int]] = []
    for slot, parent in enumerate(parents):
        paths.append((list(range(start)) if parent == ROOT else paths[parent]) + [start + slot])
    for row, path in enumerate(paths[-rows:], rows - min(rows, len(paths))):
        visible[row] = False
        visible[row, path if window is None else path[-window:]] = True
    return visible


def copy_slots_reference(keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int, int]]) -> None:
    """Copy tokens inside keys [P, kv_heads, D, page] and values [P, kv_heads, page, D] of one layer, in place.

    Semantics: K[target] = K[source], and the same for V, for one (source page, slot, target page, slot) after another
    """
    for source_page, source_slot, target_page, target_slot in moves:
        keys[target_page, :, :, target_slot] = keys[source_page, :, :, source_slot]
        values[target_page, :, target_slot] = values[source_page, :, source_slot]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last dimension.

    Semantics: x / sqrt(mean(x^2) + eps) * weight
    """
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def layer_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last dimension less its mean.

    Semantics: c / sqrt(mean(c^2) + eps) * weight, c = x - mean(x)
    """
    return rms_norm_reference(x.float() - x.float().mean(-1, keepdim=True), weight, eps)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] in Hugging Face's half-split order; cos, sin [T, N / 2], N <= D.

    Semantics: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 the halves of the first N numbers of a head;
    the others are unchanged
    """
    half = cos.shape[-1]
    x1, x2, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s, rest), dim=-1)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """Gate by SiLU.

    Semantics: silu(gate) * up, gate and up the halves of the last dimension
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """Gate by GELU in its tanh form.

    Semantics: gelu(gate) * up, gate and up the halves of the last dimension
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gelu_reference(x: Tensor) -> Tensor:
    """Apply GELU.

    Semantics: x * (1 + erf(x / sqrt(2))) / 2
    """
    return (x.double() * (1 + torch.erf(x.double() / math.sqrt(2))) / 2).float()


def softcap_reference(x: Tensor, cap: float) -> Tensor:
    """Bound numbers.

    Semantics: cap * tanh(x / cap)
    """
    return torch.tanh(x.float() / cap) * cap


def linear_reference(x: Tensor, codes: GroupQuantizedWeight, bias: Tensor | None, *, rounded: bool) -> Tensor:
    """Multiply x [T, H] with codes [O, H]; returns [T, O] float64.

    Args:
        rounded: first round every 32 neighbours of x, in the order of the codes' columns, to multiples of 1/127 of
            their largest magnitude.
    """
    columns = replace(codes, order=None)
    x = x if codes.order is None else x[:, codes.order.long()]
    exact = x.double()
    if rounded:
        groups = x.reshape(len(x), -1, 32)
        largest = groups.abs().amax(dim=-1, keepdim=True)
        # Not `127 / largest`, which torch computes as the reciprocal times 127, rounding twice.
        factor = torch.where(largest > 1e-30, torch.full_like(largest, 127) / largest, 0.0)
        unit = torch.where(largest > 1e-30, largest * (1 / 127), 0.0)
        exact = ((groups * factor).round().double() * unit.double()).view(x.shape)
    y = exact @ columns.dequantize().double().T
    return y if bias is None else y + bias.double()
