"""Numba backend: kernels for the CPU, over the pool's pages in place."""

import torch
from torch import Tensor

from sgmv_kernels.backend import Backend, PackedLinear
from sgmv_kernels.cpu_ops import attention, linear, pointwise, sgmv
from sgmv_kernels.cpu_ops.linear_autotune import wide_rows
from sgmv_kernels.cpu_ops.thread_autotune import best_threads
from sgmv_kernels.cpu_runtime.kernel_cache import address_of, numba_version
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KVFormat

numba_version()


def pack_linear(codes: GroupQuantizedWeight, bias: Tensor | None, few_rows: bool) -> PackedLinear:
    """See `ops.Ops.pack_linear`."""
    return linear.pack_linear_cpu(codes, bias, None if few_rows else wide_rows())


def warm_up(adapter_dtype: torch.dtype, kv_format: KVFormat) -> None:
    """Load every kernel, or compile it."""
    address_of(sgmv.MODULE, sgmv.ENTRIES[adapter_dtype])
    address_of(attention.MODULE, attention.ENTRIES[kv_format.name])
    address_of(pointwise.MODULE, pointwise.ROPE[kv_format.name])
    for entry in ("norm", "silu", "gelu", "heads", "cap", "take"):
        address_of(pointwise.MODULE, entry)
    for entry in linear.entries():
        address_of(linear.MODULE, entry)
    address_of("program", "run_items")


BACKEND = Backend(
    name="numba",
    activations=(torch.float32,),
    prepare_sgmv=sgmv.prepare,
    shrink=sgmv.shrink_cpu,
    expand_=sgmv.expand_cpu_,
    sgmv_=sgmv.sgmv_cpu_,
    prepare_attention=attention.prepare,
    attention=attention.attention_cpu,
    rope_write_kv=pointwise.rope_write_kv_cpu,
    add_rms_norm_=pointwise.add_rms_norm_cpu_,
    silu_mul=pointwise.silu_mul_cpu,
    gelu_mul=pointwise.gelu_mul_cpu,
    norm_heads_=pointwise.norm_heads_cpu_,
    softcap_=pointwise.softcap_cpu_,
    take_rows=pointwise.take_rows_cpu,
    pack_linear=pack_linear,
    linear=linear.linear_cpu,
    warm_up=warm_up,
    kv_formats=attention.ENTRIES,
    can_record=True,
    is_batch_invariant=True,
    wide_rows=wide_rows,
    best_threads=best_threads,
)
