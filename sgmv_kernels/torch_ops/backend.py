"""Plain torch backend: any device, every KV format; the faster kernels are measured against it."""

import torch

from sgmv_kernels.backend import Backend, one_by_one
from sgmv_kernels.torch_ops import affine, attention, linear, page_mass, pointwise, sgmv, slots

BACKEND = Backend(
    name="torch",
    activations=(torch.float32, torch.bfloat16, torch.float16),
    prepare_sgmv=sgmv.prepare,
    shrink=sgmv.shrink_torch,
    expand_=sgmv.expand_torch_,
    sgmv_=sgmv.sgmv_torch_,
    affine_=affine.affine_torch_,
    prepare_attention=attention.prepare,
    attention=attention.attention_torch,
    add_page_mass_=page_mass.add_page_mass_torch_,
    rope_write_kv=pointwise.rope_write_kv_torch,
    copy_slots=slots.copy_slots_torch,
    add_=pointwise.add_torch_,
    add_rms_norm_=pointwise.add_rms_norm_torch_,
    add_layer_norm_=pointwise.add_layer_norm_torch_,
    silu_mul=pointwise.silu_mul_torch,
    gelu_mul=pointwise.gelu_mul_torch,
    gelu=pointwise.gelu_torch,
    norm_heads_=pointwise.norm_heads_torch_,
    softcap_=pointwise.softcap_torch_,
    take_rows=linear.take_rows_torch,
    likeliest=pointwise.likeliest_torch,
    pack_linear=lambda codes, bias, few_rows: linear.PlainLinear(codes, bias),
    check_codes=lambda codes: None,
    linear=linear.linear_torch,
    linear_parts=one_by_one(linear.linear_torch),
    warm_up=lambda adapter_dtype, kv_format, progress: None,
)
