"""The built-in model in other tools' formats (Hugging Face directories and GGUF), simply rounded, by whole arrays.

`packed_checkpoints` writes the same layouts number by number for tests of the loaders; here, loaders count as tested.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from ggml_blocks import kind_of, quantize
from safetensors.torch import save_file
from torch import Tensor

from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader import Checkpoint
from lorasrv.models.quantization.tables import Fp4Format, Nf4Format, TableFormat
from lorasrv.text.tokenizer import Tokenizer

GROUP = 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
EETQ_INPUTS = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
Tensors = dict[str, Tensor]


def _words(fields: Tensor, bits: int = 4) -> Tensor:
    """Return fields [N, M] as int32 [N, M * bits / 32], the lowest bits first; a 3-bit field may span two words."""
    each = 1 if 32 % bits else 32 // bits
    joined = (fields.long().reshape(len(fields), -1, each) << bits * torch.arange(each)).sum(-1)
    if 32 % bits:
        stream = joined[..., None] >> torch.arange(bits) & 1
        joined = (stream.view(len(fields), -1, 32) << torch.arange(32)).sum(-1)
    return joined.to(torch.uint32).view(torch.int32)


def _rounded(weight: Tensor, sym: bool, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return fields [O, H], zeros and scales [O, G]."""
    groups, most = weight.float().view(len(weight), -1, GROUP), (1 << bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((torch.maximum(-low, high) * 2 if sym else high - low) / most).clamp(min=1e-6).half()
    middle = torch.full_like(scales, (most + 1) / 2)
    zeros = middle if sym else (-low / scales.float()).round().clamp(0, most).half()
    fields = (groups / scales[..., None].float()).round() + zeros[..., None].float()
    return fields.clamp(0, most).view(weight.shape), zeros, scales


def _gptq(bits: int, sym: bool) -> Callable[[Tensor], Tensors]:
    def tensors_of(weight: Tensor) -> Tensors:
        fields, zeros, scales = _rounded(weight, sym, bits)
        groups_of = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        words, lowest = _words(fields, bits).T, _words(zeros.T, bits)
        return {"qweight": words, "qzeros": lowest, "scales": scales.T, "g_idx": groups_of}

    return tensors_of


def _awq(weight: Tensor) -> Tensors:
    fields, zeros, scales = _rounded(weight, sym=False)
    order = torch.arange(len(weight)).view(-1, 8)[:, AWQ_ORDER].flatten()
    return {"qweight": _words(fields[order].T), "qzeros": _words(zeros[order].T), "scales": scales.T}


def _hqq(weight: Tensor) -> Tensors:
    """Return tensors with groups of neighbours: two fields per byte, the first half of all groups in the high bits."""
    fields, zeros, scales = _rounded(weight, sym=False)
    first, second = fields.to(torch.uint8).view(2, -1, GROUP)
    numbers = {"nbits": 4, "group_size": GROUP, "axis": 1, "shape": list(weight.shape)}
    scalars = {name: torch.tensor(number, dtype=torch.int32) for name, number in numbers.items()}
    return {"W_q": first << 4 | second, "scale": scales.view(-1, 1), "zero": zeros.view(-1, 1), **scalars}


def _eetq(weight: Tensor) -> Tensors:
    """Return the tensors of EETQ, by the four steps that its loader reverses, on whole arrays."""
    scales = (weight.float().abs().amax(1) / 128).half()
    fields = (weight.float() / scales.float()[:, None]).round().clamp(-128, 127).to(torch.int16) + 128
    outputs, inputs = fields.shape
    permuted = fields.to(torch.uint8).view(outputs, -1, 16)[..., EETQ_INPUTS].view(outputs // 2, 2, -1, 64)
    mixed = permuted.transpose(1, 2).reshape(-1, 2, 2).transpose(1, 2)
    return {"qweight": mixed.reshape(inputs, outputs).view(torch.int8), "weight_scales": scales}


def _compressed(weight: Tensor) -> Tensors:
    fields, _, scales = _rounded(weight, sym=True)
    return {"weight_packed": _words(fields), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _int8(weight: Tensor) -> Tensors:
    largest = weight.float().abs().amax(1)
    return {"weight": (weight.float() * 127 / largest[:, None]).round().to(torch.int8), "SCB": largest}


def _bitsandbytes(kind: type[TableFormat], name: str) -> Callable[[Tensor], Tensors]:
    values = torch.tensor(kind.values)
    order = values.argsort(stable=True)
    bounds = (values[order][1:] + values[order][:-1]) / 2

    def tensors_of(weight: Tensor) -> Tensors:
        blocks = weight.float().view(-1, GROUP)
        largest = blocks.abs().amax(1)
        codes = order[torch.bucketize((blocks / largest[:, None]).flatten(), bounds)].to(torch.uint8)
        state = {"quant_type": name, "blocksize": GROUP, "dtype": "float16", "shape": list(weight.shape)}
        return {
            "weight": (codes[::2] << 4 | codes[1::2])[:, None],
            "weight.absmax": largest,
            "weight.quant_map": values.clone(),
            f"weight.quant_state.bitsandbytes__{name}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }

    return tensors_of


def _fp8(weight: Tensor) -> Tensors:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _group_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}


def _gptq_of(bits: int, sym: bool) -> tuple[dict[str, Any], Callable[[Tensor], Tensors]]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": sym, "desc_act": False}
    return config | {"checkpoint_format": "gptq_v2"}, _gptq(bits, sym)


FILES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensors]]] = {
    "GPTQ, 2 bits": _gptq_of(2, sym=False),
    "GPTQ, 3 bits": _gptq_of(3, sym=False),
    "GPTQ, 4 bits": _gptq_of(4, sym=False),
    "GPTQ, 4 bits, symmetric": _gptq_of(4, sym=True),
    "GPTQ, 8 bits": _gptq_of(8, sym=True),
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
    "bitsandbytes, NF4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        _bitsandbytes(Nf4Format, "nf4"),
    ),
    "bitsandbytes, FP4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        _bitsandbytes(Fp4Format, "fp4"),
    ),
    "HQQ, 4 bits": (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": GROUP, "axis": 1}},
            "skip_modules": ["lm_head"],
        },
        _hqq,
    ),
    "EETQ": ({"quant_method": "eetq"}, _eetq),
    "FP8": ({"quant_method": "fp8"}, _fp8),
}
"""Name -> quantization_config, and the tensors of a linear."""
GGUF_FILES: dict[str, dict[str, str]] = {
    "GGUF, Q4_K, Q5_0 where 256 do not fit": {"ffn_down": "Q4_K", "token_embd": "Q8_0", "": "Q5_0"},
    "GGUF, Q6_K, Q8_0 where 256 do not fit": {"ffn_down": "Q6_K", "": "Q8_0"},
    "GGUF, IQ4_NL": {"token_embd": "Q8_0", "": "IQ4_NL"},
    "GGUF, MXFP4": {"token_embd": "Q8_0", "": "MXFP4"},
}
"""Name -> ggml type of each tensor, by a part of its name; rows of K-quants have a multiple of 256 numbers."""
LARGER = "GGUF, Q4_1, random, the shape of SmolLM2-1.7B"
LARGER_LAYERS = 24
LARGER_DIMS = {576: 2048, 192: 2048, 1536: 8192}
"""Hidden size, that of keys and values, and intermediate size: the model's -> the larger one's."""
LARGER_FIELDS = {
    "llama.block_count": LARGER_LAYERS,
    "llama.embedding_length": 2048,
    "llama.feed_forward_length": 8192,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 32,
}
LARGER_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LARGER_LAYERS,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "vocab_size": 49152,
}
"""What adapters of the larger model are made and converted by."""
GgufTensor = tuple[str, npt.NDArray[np.float32]]


def write_gguf_file(file: Path, target: Path, kind: str) -> Path:
    """Write a GGUF file of the model, `file`, as one of `GGUF_FILES`, or random weights as `LARGER`."""
    reader = gguf.GGUFReader(file)
    if kind == LARGER:
        kinds, fields, tensors = {"": "Q4_1"}, LARGER_FIELDS, _larger_tensors(reader)
    else:
        kinds, fields, tensors = GGUF_FILES[kind], {}, _stored_tensors(reader)
    writer = gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = entry.types[-1] if entry.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, fields.get(name, entry.contents()), entry.types[0], inner)
    for name, values in tensors:
        wanted = kind_of(name, kinds) if values.ndim == 2 else "F32"
        writer.add_tensor(name, quantize(values, wanted), raw_dtype=gguf.GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _stored_tensors(reader: gguf.GGUFReader) -> Iterator[GgufTensor]:
    for tensor in reader.tensors:
        yield tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _larger_tensors(reader: gguf.GGUFReader) -> Iterator[GgufTensor]:
    """Return random tensors of the larger shape: the first layer's names for every layer, and norms of ones."""
    made = np.random.default_rng(0)
    shapes = {t.name: tuple(LARGER_DIMS.get(int(n), int(n)) for n in reversed(t.shape)) for t in reader.tensors}
    of_first = {name: shape for name, shape in shapes.items() if name.startswith("blk.0.")}
    layers = {name.replace("blk.0.", f"blk.{i}."): s for i in range(LARGER_LAYERS) for name, s in of_first.items()}
    for name, shape in ({name: s for name, s in shapes.items() if not name.startswith("blk.")} | layers).items():
        is_norm = len(shape) == 1
        yield name, np.ones(shape, np.float32) if is_norm else made.normal(0, 0.02, shape).astype(np.float32)


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
        "eos_token_id": list(spec.eos_token_ids),
        "bos_token_id": spec.bos_token_id,
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(described))
    source = checkpoint.tokenizer_source()
    (folder / "tokenizer.json").write_text(Tokenizer.from_source(source)._backend.to_str(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source.chat_template}))
    return folder
