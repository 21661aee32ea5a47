"""The CPU's kernels: written for Numba, over the pool's pages in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgmv_kernels import attention_cpu, linear_cpu, pointwise_cpu, sgmv_cpu
from sgmv_kernels.backend import Backend, PackedLinear
from sgmv_kernels.group_codes import GroupCodes
from sgmv_kernels.kernel_code import address_of, numba_version
from sgmv_kernels.linear_probe import wide_rows
from sgmv_kernels.team_probe import best_threads

numba_version()


def pack_linear(codes: GroupCodes, bias: Tensor | None, few_rows: bool) -> PackedLinear:
    """See `ops.Ops.pack_linear`."""
    return linear_cpu.pack_linear_cpu(codes, bias, None if few_rows else wide_rows())


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Load every kernel, or compile it."""
    for dtype in dtypes:
        address_of(sgmv_cpu.MODULE, sgmv_cpu.ENTRIES[dtype])
        address_of(attention_cpu.MODULE, attention_cpu.ENTRIES[dtype])
        address_of(pointwise_cpu.MODULE, pointwise_cpu.ROPE[dtype])
    for entry in ("norm", "silu", "gelu", "heads", "cap", "take"):
        address_of(pointwise_cpu.MODULE, entry)
    for entry in linear_cpu.entries():
        address_of(linear_cpu.MODULE, entry)
    address_of("program_numba", "run_items")


BACKEND = Backend(
    name="numba",
    activations=(torch.float32,),
    prepare_sgmv=sgmv_cpu.prepare,
    shrink=sgmv_cpu.shrink_cpu,
    expand_=sgmv_cpu.expand_cpu_,
    sgmv_=sgmv_cpu.sgmv_cpu_,
    prepare_attention=attention_cpu.prepare,
    attention=attention_cpu.attention_cpu,
    rope_write_kv=pointwise_cpu.rope_write_kv_cpu,
    add_rms_norm_=pointwise_cpu.add_rms_norm_cpu_,
    silu_mul=pointwise_cpu.silu_mul_cpu,
    gelu_mul=pointwise_cpu.gelu_mul_cpu,
    norm_heads_=pointwise_cpu.norm_heads_cpu_,
    softcap_=pointwise_cpu.softcap_cpu_,
    take_rows=pointwise_cpu.take_rows_cpu,
    pack_linear=pack_linear,
    linear=linear_cpu.linear_cpu,
    warm_up=warm_up,
    can_record=True,
    wide_rows=wide_rows,
    best_threads=best_threads,
)
