"""Numba backend: kernels for the CPU, over the pool's pages in place."""

import torch
from torch import Tensor

from sgmv_kernels.backend import Backend, PackedLinear, Progress
from sgmv_kernels.cpu_ops import affine, attention, linear, page_mass, pointwise, sgmv, slots
from sgmv_kernels.cpu_ops.likeliest import likeliest_cpu
from sgmv_kernels.cpu_ops.linear_autotune import amx_rows, wide_rows
from sgmv_kernels.cpu_ops.thread_autotune import best_threads
from sgmv_kernels.cpu_ops.weight_packing import check_codes
from sgmv_kernels.cpu_runtime.kernel_cache import address_of, numba_version
from sgmv_kernels.cpu_runtime.kernel_compiler import compile_missing, kernel_address, place
from sgmv_kernels.cpu_runtime.kernel_names import common_kernels, further_kernels
from sgmv_kernels.formats.adapter_panels import AdapterLayout
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KVFormat

numba_version()


def pack_linear(codes: GroupQuantizedWeight, bias: Tensor | None, few_rows: bool) -> PackedLinear:
    """See `ops.Ops.pack_linear`."""
    return linear.pack_linear_cpu(codes, bias, None if few_rows else wide_rows(), amx_rows())


def warm_up(adapter_dtype: torch.dtype, kv_format: KVFormat, progress: Progress) -> None:
    """Load the kernels that most models need, compile those that are missing; all, where none can be kept."""
    formats = str(adapter_dtype).removeprefix("torch."), kv_format.name
    kernels = common_kernels(*formats)
    compile_missing(kernels, progress)
    if place() is None:
        kernels += further_kernels(*formats)
    for kernel in kernels:
        address_of(*kernel)


def load_kernels_of(layout: AdapterLayout, dtype: torch.dtype) -> None:
    """See `ops.Ops.load_kernels_of`."""
    if layout.are_codes:
        kernel_address(sgmv.MODULE, sgmv.ENTRIES[dtype, True])
    if layout.vectors:
        kernel_address(affine.MODULE, affine.ENTRY)


BACKEND = Backend(
    name="numba",
    activations=(torch.float32,),
    prepare_sgmv=sgmv.prepare,
    shrink=sgmv.shrink_cpu,
    expand_=sgmv.expand_cpu_,
    sgmv_=sgmv.sgmv_cpu_,
    affine_=affine.affine_cpu_,
    prepare_attention=attention.prepare,
    attention=attention.attention_cpu,
    add_page_mass_=page_mass.add_page_mass_cpu_,
    rope_write_kv=pointwise.rope_write_kv_cpu,
    copy_slots=slots.copy_slots_cpu,
    add_=pointwise.add_cpu_,
    add_rms_norm_=pointwise.add_rms_norm_cpu_,
    add_layer_norm_=pointwise.add_layer_norm_cpu_,
    silu_mul=pointwise.silu_mul_cpu,
    gelu_mul=pointwise.gelu_mul_cpu,
    gelu=pointwise.gelu_cpu,
    norm_heads_=pointwise.norm_heads_cpu_,
    softcap_=pointwise.softcap_cpu_,
    take_rows=pointwise.take_rows_cpu,
    likeliest=likeliest_cpu,
    pack_linear=pack_linear,
    check_codes=check_codes,
    linear=linear.linear_cpu,
    linear_parts=linear.linear_parts_cpu,
    warm_up=warm_up,
    load_kernels_of=load_kernels_of,
    kv_formats=attention.ENTRIES,
    can_record=True,
    is_batch_invariant=True,
    wide_rows=wide_rows,
    best_threads=best_threads,
)
