"""The CPU's kernels: Numba, over the pool's pages in place."""

from collections.abc import Sequence

import torch

from sgmv_kernels import attention_numba, pointwise_torch, sgmv_numba
from sgmv_kernels.backend import Backend

BACKEND = Backend(
    name="numba",
    activations=(torch.float32,),
    prepare_sgmv=sgmv_numba.prepare,
    shrink=sgmv_numba.shrink_numba,
    expand_=sgmv_numba.expand_numba_,
    sgmv_=sgmv_numba.sgmv_numba_,
    prepare_attention=attention_numba.prepare,
    attention=attention_numba.attention_numba,
    rope_write_kv=pointwise_torch.rope_write_kv_torch,
    add_rms_norm_=pointwise_torch.add_rms_norm_torch_,
    silu_mul=pointwise_torch.silu_mul_torch,
    warm_up=lambda dtypes: None,
)
