"""The CPU's kernels: Numba, over the pool's pages in place."""

from collections.abc import Sequence

import torch

from sgmv_kernels import attention_numba, pointwise_numba, sgmv_numba
from sgmv_kernels.backend import Backend


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Compile every kernel, or read it from the cache."""
    for module in (sgmv_numba, attention_numba, pointwise_numba):
        module.warm_up(dtypes)


BACKEND = Backend(
    name="numba",
    activations=(torch.float32,),
    prepare_sgmv=sgmv_numba.prepare,
    shrink=sgmv_numba.shrink_numba,
    expand_=sgmv_numba.expand_numba_,
    sgmv_=sgmv_numba.sgmv_numba_,
    prepare_attention=attention_numba.prepare,
    attention=attention_numba.attention_numba,
    rope_write_kv=pointwise_numba.rope_write_kv_numba,
    add_rms_norm_=pointwise_numba.add_rms_norm_numba_,
    silu_mul=pointwise_numba.silu_mul_numba,
    warm_up=warm_up,
)
