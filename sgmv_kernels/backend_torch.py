"""The plain torch kernels: any device, and what the faster ones are measured against."""

import torch

from sgmv_kernels import attention_torch, linear_torch, pointwise_torch, sgmv_torch
from sgmv_kernels.backend import Backend

BACKEND = Backend(
    name="torch",
    activations=(torch.float32, torch.bfloat16, torch.float16),
    prepare_sgmv=sgmv_torch.prepare,
    shrink=sgmv_torch.shrink_torch,
    expand_=sgmv_torch.expand_torch_,
    sgmv_=sgmv_torch.sgmv_torch_,
    prepare_attention=attention_torch.prepare,
    attention=attention_torch.attention_torch,
    rope_write_kv=pointwise_torch.rope_write_kv_torch,
    add_rms_norm_=pointwise_torch.add_rms_norm_torch_,
    silu_mul=pointwise_torch.silu_mul_torch,
    gelu_mul=pointwise_torch.gelu_mul_torch,
    norm_heads_=pointwise_torch.norm_heads_torch_,
    softcap_=pointwise_torch.softcap_torch_,
    take_rows=linear_torch.take_rows_torch,
    pack_linear=lambda codes, bias, few_rows: linear_torch.PlainLinear(codes, bias),
    linear=linear_torch.linear_torch,
    warm_up=lambda dtypes: None,
)
