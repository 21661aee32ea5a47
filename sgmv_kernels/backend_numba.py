"""The CPU's kernels: written for Numba, over the pool's pages in place."""

from collections.abc import Sequence

import torch

from sgmv_kernels import attention_cpu, pointwise_cpu, sgmv_cpu
from sgmv_kernels.backend import Backend
from sgmv_kernels.kernel_code import numba_version

numba_version()


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Load every kernel, or compile it."""
    for dtype in dtypes:
        sgmv_cpu.kernel_of(dtype)
        attention_cpu.kernel_of(dtype)
        pointwise_cpu.kernel_of(pointwise_cpu.ROPE[dtype])
    for entry in ("norm", "silu"):
        pointwise_cpu.kernel_of(entry)


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
    warm_up=warm_up,
)
