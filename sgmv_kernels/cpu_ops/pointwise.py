"""CPU launchers of the ops between the linears: norms, rotation, activations. Each passes over memory once."""

import numpy as np
from torch import Tensor

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.pointwise import (
    CODES,
    COLUMNS,
    FLOAT,
    HALF,
    HEADS,
    KEY_SCALES,
    KEY_WIDTH,
    KEYS,
    KV_HEADS,
    OUT,
    PAGE,
    PAGE_BYTES,
    PAGES,
    ROW_BYTES,
    ROWS,
    SLOTS,
    UNIT_BYTES,
    UNITS,
    VALUE_MINIMA,
    VALUE_SCALES,
    VALUES,
    WIDTH,
    A,
    B,
    C,
)
from sgmv_kernels.cpu_runtime.launch import Part, Words, empty, launch, recorded_maker, rows_are_now, rows_part
from sgmv_kernels.formats import kv_format as formats
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.formats.weight_codes import ROUND_ROWS

MODULE = "pointwise"
TAKEN, SAMPLED = "taken", "sampled"
"""Names of parts of a step that these kernels use."""
ROPE = {
    "bfloat16": "rope_bf16",
    "float16": "rope_fp16",
    "float32": "rope_fp32",
    "int8": "rope_int8",
    "k8v4": "rope_k8v4",
}
"""KV formats that `rope_write_kv` writes, and its entry for each."""


def add_cpu_(x: Tensor, delta: Tensor) -> None:
    """See `ops.Ops.add_`."""
    own = {A: x.data_ptr(), B: delta.data_ptr(), OUT: x.data_ptr(), WIDTH: x.shape[1]}
    _launch_groups("add", x, len(x) // ROUND_ROWS, own)


def add_rms_norm_cpu_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    return _normed("norm", x, delta, weight, eps)


def add_layer_norm_cpu_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_layer_norm_`."""
    return _normed("layer_norm", x, delta, weight, eps)


def _normed(entry: str, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = empty("normed", x.shape)
    own = {
        A: x.data_ptr(),
        B: 0 if delta is None else delta.data_ptr(),
        C: weight.data_ptr(),
        OUT: out.data_ptr(),
        WIDTH: x.shape[1],
        FLOAT: _bits(eps),
    }
    _launch_groups(entry, out, len(x) // ROUND_ROWS, own)
    return out


def silu_mul_cpu(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty("gated", (rows, width))
    _launch_gate("silu", gate_up, out)
    return out


def take_rows_cpu(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """See `ops.Ops.take_rows`."""
    launch(MODULE, "take", taken_part(rows), {A: x.data_ptr(), OUT: out.data_ptr(), WIDTH: x.shape[1]})
    rows_are_now(SAMPLED)
    return out


def taken_part(rows: Tensor) -> Part:
    """Return the words that a step gives to `take_rows`."""
    count = rows.shape[0]
    return Part(TAKEN, {NUM_ROWS: count, B: rows.data_ptr()}, count // ROWS)


def rope_name(cos: Tensor) -> str:
    """Return the name of the part that holds the addresses of these angles; a model may have two kinds."""
    return f"rope {cos.data_ptr()}"


def rope_part(rows: int, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor) -> Part:
    """Return the words that a step gives to `rope_write_kv`."""
    addresses = {B: cos.data_ptr(), C: sin.data_ptr(), PAGES: pages.data_ptr(), SLOTS: slots.data_ptr()}
    return Part(rope_name(cos), {NUM_ROWS: rows, **addresses}, rows // ROWS)


def rope_write_kv_cpu(
    qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor, kv_heads: int
) -> Tensor:
    """See `ops.Ops.rope_write_kv`, and `rope_queries` for no key heads."""
    rows, dim = qkv.shape[0], kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = empty("queries", (rows, heads, dim))
    own = {
        A: qkv.data_ptr(),
        OUT: q.data_ptr(),
        WIDTH: dim,
        HEADS: heads,
        KV_HEADS: kv_heads,
        PAGE: kv.page_size,
        KEYS: kv.keys.data_ptr(),
        VALUES: kv.values.data_ptr(),
        PAGE_BYTES: kv.page_bytes,
        HALF: cos.shape[1],
        KEY_SCALES: kv.address(formats.KEY_SCALES),
        VALUE_SCALES: kv.address(formats.VALUE_SCALES),
        VALUE_MINIMA: kv.address(formats.VALUE_MINIMA),
    }
    launch(MODULE, ROPE[kv.format.name], rope_part(rows, cos, sin, pages, slots), own)
    return q


def gelu_mul_cpu(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.gelu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty("gated", (rows, width))
    _launch_gate("gelu", gate_up, out)
    return out


def gelu_cpu(x: Tensor) -> Tensor:
    """See `ops.Ops.gelu`."""
    out = empty("gated", x.shape)
    _launch_gate("gelu_exact", x, out)
    return out


def norm_heads_cpu_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int, eps: float) -> None:
    """See `ops.Ops.norm_heads_`."""
    own = {
        A: qkv.data_ptr(),
        B: q_weight.data_ptr(),
        C: k_weight.data_ptr(),
        WIDTH: len(q_weight),
        KEY_WIDTH: len(k_weight),
        FLOAT: _bits(eps),
        HEADS: (qkv.shape[1] - 2 * kv_heads * len(k_weight)) // len(q_weight),
        KV_HEADS: kv_heads,
    }
    _launch("heads", len(qkv), own)


def softcap_cpu_(x: Tensor, cap: float) -> None:
    """See `ops.Ops.softcap_`."""
    _launch("cap", len(x), {A: x.data_ptr(), WIDTH: x.shape[1], FLOAT: _bits(cap)})


def round_last(x: Tensor, codes: int, row_bytes: int, units: int, unit_bytes: int) -> bool:
    """Have the launch that makes x round it, too, if that is what was recorded last; return whether it does.

    Args:
        codes, row_bytes, units, unit_bytes: addresses of `cpu_ops.linear.RoundedRows`, and bytes from row to row.
    """
    own = recorded_maker(x, MODULE)
    if own is None:
        return False
    own |= {CODES: codes, ROW_BYTES: row_bytes, UNITS: units, UNIT_BYTES: unit_bytes}
    return True


def _bits(number: float) -> int:
    return np.float64(number).view(np.int64).item()


def _launch_gate(entry: str, x: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    own = {A: x.data_ptr(), OUT: out.data_ptr(), WIDTH: width}
    # Fewer rows than are rounded at a time are not worth waking a second thread.
    _launch_groups(entry, out, rows // ROUND_ROWS * -(-width // COLUMNS), own)


def _launch_groups(entry: str, out: Tensor, tasks: int, own: Words) -> None:
    """Launch a kernel whose tasks are of as many rows as are rounded at a time, so that it can round them."""
    launch(MODULE, entry, rows_part(len(out), tasks), own, result=out)


def _launch(entry: str, rows: int, own: Words) -> None:
    launch(MODULE, entry, rows_part(rows, rows // ROWS), own)
