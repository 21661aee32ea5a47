"""Unpack the fields of a checkpoint's integers, and convert them to codes that the kernels support.

Shapes: O outputs, H inputs, G groups of a row. Fields are whole numbers of a few bits, unsigned.
"""

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS

MOST_GROUP = 128
"""Largest group size that every backend supports. For larger groups, scales and minima are repeated."""
_CHUNK = 1 << 17


def unpack_fields(words: Tensor, bits: int) -> Tensor:
    """Unpack fields that lie densely in words, the lowest bits first.

    Args:
        words: [..., N] integers of any width.
        bits: bits of a field.
    Returns: [..., N * width // bits] uint8; of 3, 5, 6 and 7 bits, fields may lie in two words.
    """
    stream = byte_stream(words)
    if bits == 8:
        return stream
    if bits in (2, 4):
        return _spread_bytes(stream, bits).view(*stream.shape[:-1], -1)
    # Eight fields take `bits` bytes.
    whole = stream.shape[-1] // bits * bits
    parts = stream[..., :whole].reshape(*stream.shape[:-1], -1, bits).to(torch.int32 if bits == 3 else torch.int64)
    joined = torch.zeros_like(parts[..., 0])
    for i in range(bits):
        joined |= parts[..., i] << 8 * i
    fields = torch.empty((*joined.shape, 8), dtype=torch.uint8)
    for i in range(8):
        fields[..., i] = joined >> bits * i & (1 << bits) - 1
    return fields.flatten(-2)


def byte_stream(words: Tensor) -> Tensor:
    """Return the bytes of words [..., N], [..., N * their size] uint8."""
    # Flatten first: a dimension of size 1 may have any stride, which a view with another dtype does not accept.
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * words.itemsize)


def _spread_bytes(stream: Tensor, bits: int) -> Tensor:
    """Spread each field of 2 or 4 bits of a stream of bytes to its own byte, in chunks that stay in the CPU cache.

    A byte becomes a wide number; shifted copies put one field into each byte of it.
    """
    fields, flat = torch.empty(stream.numel() * 8 // bits, dtype=torch.uint8), stream.view(-1)
    kind, mask = (torch.int16, 0x0F0F) if bits == 4 else (torch.int32, 0x03030303)
    wide = fields.view(kind)
    for start in range(0, flat.numel(), _CHUNK):
        spread = wide[start : start + _CHUNK]
        spread.copy_(flat[start : start + _CHUNK])
        once = spread.clone()
        for place in range(1, 8 // bits):
            spread |= once << place * (8 - bits)
        spread &= mask
    return fields


def unpack_padded_fields(words: Tensor, bits: int) -> Tensor:
    """Unpack fields that do not span words: each int32 of `words` [..., N] has as many as fit, lowest bits first."""
    fields = torch.stack([words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)], dim=-1)
    return fields.flatten(-2).to(torch.uint8)


def exact_scales(name: str, scales: Tensor) -> Tensor:
    """Return scales as fp16 if that holds them exactly, else as fp32.

    Raises:
        CorruptModel: a scale is not finite.
    """
    wide = scales.float()
    if not wide.isfinite().all():
        raise CorruptModel(f"{name} holds NaN or infinity")
    half = wide.half()
    return half if torch.equal(half.float(), wide) else wide


def sorted_inputs(name: str, groups_of: Tensor, groups: int) -> Tensor | None:
    """Return the inputs in the order of their groups.

    Args:
        name: name of the tensor, for messages.
        groups_of: [H] the group of each input.
        groups: number of groups.
    Returns: [H] int32; None if they are in that order.
    Raises:
        CorruptModel: an input's group does not exist.
        UnsupportedModel: the groups have different lengths.
    """
    if int(groups_of.min()) < 0 or int(groups_of.max()) >= groups:
        raise CorruptModel(f"{name} names groups outside 0 to {groups - 1}")
    counts = torch.bincount(groups_of.long(), minlength=groups)
    if int(counts.min()) != int(counts.max()):
        raise UnsupportedModel(
            f"{name} has groups of {int(counts.min())} to {int(counts.max())} inputs, not of one size"
        )
    order = groups_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order.int()


def group_codes(
    fields: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, order: Tensor | None = None
) -> GroupQuantizedWeight:
    """Make codes of unpacked fields: (fields - zeros) * scales.

    Args:
        fields: [O, H] uint8, in the inputs' own order.
        scales: [O, G], from `exact_scales`.
        zeros: [O, G] integers; None for the middle of the range.
        bits: bits of a field.
        order: from `sorted_inputs`.
    Returns: the same weights, in groups of the largest power of two up to `MOST_GROUP` that divides the given groups;
        unchanged if that is 1.
    """
    # NumPy takes columns four times as fast as torch.
    columns = fields if order is None else torch.from_numpy(fields.numpy().take(order.numpy(), axis=1))
    middle = 1 << bits - 1
    offsets = torch.full(scales.shape, middle, dtype=torch.int16) if zeros is None else zeros.to(torch.int16)
    group = columns.shape[1] // scales.shape[1]
    if bits > 4:
        # Bytes wrap.
        signed, centred = (columns - middle).view(torch.int8), (offsets - middle).contiguous()
        zeros = centred if centred.any() else None
        made = GroupQuantizedWeight(signed.contiguous(), scales.contiguous(), None, INT8_LEVELS, zeros, order)
    else:
        levels = Q3H_LEVELS if bits <= 3 and group % 64 == 0 else INT4_LEVELS
        made = GroupQuantizedWeight(
            columns.contiguous(), scales.contiguous(), None, levels, offsets.contiguous(), order
        )
    return _in_groups_that_kernels_take(made)


def minima_codes(fields: Tensor, scales: Tensor, minima: Tensor, bits: int) -> GroupQuantizedWeight:
    """Make codes of unpacked fields: fields * scales + minima.

    Args:
        fields: [O, H] uint8.
        scales, minima: [O, G], fp16 or fp32.
        bits: of a field.
    Returns: as `group_codes`.
    """
    middle = 1 << bits - 1
    if bits > 4:
        # Bytes wrap.
        minima, scales = minima.float() + middle * scales.float(), scales.float()
        codes, levels = (fields - middle).view(torch.int8), INT8_LEVELS
    else:
        group = fields.shape[1] // scales.shape[1]
        codes, levels = fields, Q3H_LEVELS if bits <= 3 and group % 64 == 0 else INT4_LEVELS
    if scales.dtype != minima.dtype:
        scales, minima = scales.float(), minima.float()
    made = GroupQuantizedWeight(codes.contiguous(), scales.contiguous(), minima.contiguous(), levels)
    return _in_groups_that_kernels_take(made)


def _in_groups_that_kernels_take(codes: GroupQuantizedWeight) -> GroupQuantizedWeight:
    smaller = min(codes.group & -codes.group, MOST_GROUP)
    return codes if smaller in (codes.group, 1) else codes.in_groups_of(smaller)
