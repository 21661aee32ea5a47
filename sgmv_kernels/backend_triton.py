"""The Triton kernels: CUDA devices, and CPU tensors under Triton's interpreter (tests)."""

import torch

try:
    import triton
except ImportError as error:
    raise ImportError("triton is not installed") from error

if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    raise ImportError("torch sees no CUDA device, and TRITON_INTERPRET=1 is not set")
if triton.knobs.runtime.interpret and isinstance(triton.language.sum, triton.JITFunction):
    raise ImportError("TRITON_INTERPRET=1 was set after triton had been imported; set it before")

from sgmv_kernels import attention_triton, linear_torch, linear_triton, pointwise_triton, sgmv_triton
from sgmv_kernels.backend import Backend

BACKEND = Backend(
    name="triton",
    activations=(torch.float32, torch.bfloat16, torch.float16),
    prepare_sgmv=sgmv_triton.prepare,
    shrink=sgmv_triton.shrink,
    expand_=sgmv_triton.expand_,
    sgmv_=sgmv_triton.sgmv_,
    prepare_attention=attention_triton.prepare,
    attention=attention_triton.attention,
    rope_write_kv=pointwise_triton.rope_write_kv,
    add_rms_norm_=pointwise_triton.add_rms_norm_,
    silu_mul=pointwise_triton.silu_mul,
    gelu_mul=pointwise_triton.gelu_mul,
    norm_heads_=pointwise_triton.norm_heads_,
    softcap_=pointwise_triton.softcap_,
    take_rows=linear_torch.take_rows_torch,
    pack_linear=lambda codes, bias, few_rows: linear_triton.pack_linear(codes, bias),
    linear=linear_triton.linear,
    warm_up=lambda dtypes: None,
)
