"""The built-in model as a Hugging Face directory in other tools' formats, rounded plainly, by whole arrays.

`packed_checkpoints` writes the same layouts number by number; here tests of loaders are taken for granted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader import Checkpoint
from lorasrv.models.quantization.tables import Nf4Format

GROUP = 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]


def _words(fields: Tensor) -> Tensor:
    """Fields of 4 bits [N, M] as int32 [N, M / 8], the lowest bits first."""
    shifted = fields.long().view(len(fields), -1, 8) << 4 * torch.arange(8)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def _rounded(weight: Tensor, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Fields [O, H], zeros and scales [O, G]."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((torch.maximum(-low, high) * 2 if sym else high - low) / 15).clamp(min=1e-6).half()
    zeros = torch.full_like(scales, 8.0) if sym else (-low / scales.float()).round().clamp(0, 15).half()
    fields = (groups / scales[..., None].float()).round() + zeros[..., None].float()
    return fields.clamp(0, 15).view(weight.shape), zeros, scales


def _gptq(weight: Tensor) -> Tensors:
    fields, zeros, scales = _rounded(weight, sym=False)
    groups_of = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": _words(fields).T, "qzeros": _words(zeros.T), "scales": scales.T, "g_idx": groups_of}


def _awq(weight: Tensor) -> Tensors:
    fields, zeros, scales = _rounded(weight, sym=False)
    order = torch.arange(len(weight)).view(-1, 8)[:, AWQ_ORDER].flatten()
    return {"qweight": _words(fields[order].T), "qzeros": _words(zeros[order].T), "scales": scales.T}


def _compressed(weight: Tensor) -> Tensors:
    fields, _, scales = _rounded(weight, sym=True)
    return {"weight_packed": _words(fields), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _int8(weight: Tensor) -> Tensors:
    largest = weight.float().abs().amax(1)
    return {"weight": (weight.float() * 127 / largest[:, None]).round().to(torch.int8), "SCB": largest}


def _nf4(weight: Tensor) -> Tensors:
    table, blocks = torch.tensor(Nf4Format.values), weight.float().view(-1, GROUP)
    largest = blocks.abs().amax(1)
    bounds = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize((blocks / largest[:, None]).flatten(), bounds).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float16", "shape": list(weight.shape)}
    return {
        "weight": (codes[::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": largest,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _fp8(weight: Tensor) -> Tensors:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _group_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}


FILES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensors]]] = {
    "GPTQ, 4 bits": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq,
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "compressed-tensors, 4 bits": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"all": _group_of({"num_bits": 4, "strategy": "group", "group_size": GROUP})},
        },
        _compressed,
    ),
    "bitsandbytes, LLM.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
    "bitsandbytes, NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
    "FP8": ({"quant_method": "fp8"}, _fp8),
}
"""Name -> quantization_config, and the tensors of a linear."""


def write_file(checkpoint: Checkpoint, folder: Path, kind: str) -> Path:
    """Write the model with the linears of its layers in one of `FILES`, all else in fp16."""
    spec, (config, tensors_of) = checkpoint.spec, FILES[kind]
    folder.mkdir(parents=True)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(spec).items():
        weight, module = checkpoint.tensor(name), name.removesuffix(".weight")
        is_linear = len(shape) == 2 and "layers" in name
        made = {f"{module}.{end}": t for end, t in tensors_of(weight).items()} if is_linear else {name: weight.half()}
        tensors |= {end: tensor.contiguous() for end, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_head,
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder
