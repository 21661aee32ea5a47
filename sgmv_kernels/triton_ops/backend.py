"""Triton backend: CUDA devices, and CPU tensors under Triton's interpreter (tests)."""

import torch

from sgmv_kernels.backend import Backend, one_by_one
from sgmv_kernels.torch_ops import linear as linear_torch
from sgmv_kernels.torch_ops import pointwise as pointwise_torch
from sgmv_kernels.triton_ops import affine, attention, linear, page_mass, pointwise, sgmv, slots
from sgmv_kernels.triton_ops.weight_packing import check_codes

try:
    import triton
except ImportError as error:
    raise ImportError("triton is not installed") from error
if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    raise ImportError("torch sees no CUDA device, and TRITON_INTERPRET=1 is not set")
if triton.knobs.runtime.interpret and isinstance(triton.language.sum, triton.JITFunction):
    raise ImportError("TRITON_INTERPRET=1 was set after triton had been imported; set it before")
BACKEND = Backend(
    name="triton",
    activations=(torch.float32, torch.bfloat16, torch.float16),
    prepare_sgmv=sgmv.prepare,
    shrink=sgmv.shrink,
    expand_=sgmv.expand_,
    sgmv_=sgmv.sgmv_,
    affine_=affine.affine_,
    prepare_attention=attention.prepare,
    attention=attention.attention,
    add_page_mass_=page_mass.add_page_mass_,
    rope_write_kv=pointwise.rope_write_kv,
    copy_slots=slots.copy_slots,
    add_=pointwise_torch.add_torch_,
    add_rms_norm_=pointwise.add_rms_norm_,
    add_layer_norm_=pointwise.add_layer_norm_,
    silu_mul=pointwise.silu_mul,
    gelu_mul=pointwise.gelu_mul,
    gelu=pointwise.gelu,
    norm_heads_=pointwise.norm_heads_,
    softcap_=pointwise.softcap_,
    take_rows=linear_torch.take_rows_torch,
    likeliest=pointwise_torch.likeliest_torch,
    pack_linear=lambda codes, bias, few_rows: linear.pack_linear(codes, bias),
    check_codes=check_codes,
    linear=linear.linear,
    linear_parts=one_by_one(linear.linear),
    warm_up=lambda adapter_dtype, kv_format, progress: None,
    kv_formats=attention.KV_FORMATS,
)
