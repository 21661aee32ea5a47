"""Make the committed checkpoints of tests/lorasrv/models/loader/packed/data with the libraries' own packing code.

    python tests/support/make_packed_checkpoints.py LIBRARIES

LIBRARIES is a folder into which these were unpacked, without their dependencies: the wheels of auto-gptq 0.7.1,
compressed-tensors 0.20.0, loguru 0.7.3 and bitsandbytes 0.50.2, and the source of autoawq 0.2.9. With transformers 5
the packages of AutoGPTQ and AutoAWQ cannot be imported, so the files that pack are loaded alone, beside stand-ins for
their packages. GPTQModel has no wheel and was not built: its layouts (gptq_v2, zeros with borrow, act-order, dynamic,
other words) are written by `packed_checkpoints.py` from their description. Written with torch 2.13.0 and transformers
5.23.0.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from packed_checkpoints import DATA, Quantized, Tensors, base, convert, read_bitsandbytes
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32


def load(name: str, path: Path) -> Any:
    """Import one file of a package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear_of(weight: Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data = weight.clone()
    return made


def by_autogptq(libraries: Path) -> Callable[[str, Tensor], Tensors]:
    library = load("autogptq_file", libraries / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda_old.py")

    def tensors_of(module: str, weight: Tensor) -> Tensors:
        made = Quantized(weight, 4, GROUP)
        held = library.QuantLinear(4, GROUP, weight.shape[1], weight.shape[0], False)
        # It does not clamp: the weight is one that the codes give exactly.
        scales, zeros = torch.from_numpy(made.scales).float(), torch.from_numpy(made.zeros).float()
        held.pack(linear_of(made.weight()), scales, zeros, None)
        return {
            "qweight": held.qweight,
            "qzeros": held.qzeros,
            "scales": held.scales.half(),
            "g_idx": held.g_idx.int(),
        }

    return tensors_of


def by_autoawq(libraries: Path, version: str) -> Callable[[str, Tensor], Tensors]:
    source = next(libraries.glob("autoawq-*")) / "awq"
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        sys.modules[name] = types.ModuleType(name)
    for name in ("module", "utils", "packing_utils"):
        load(f"awq.utils.{name}", source / "utils" / f"{name}.py")
    library = load(f"awq.modules.linear.{version}", source / "modules" / "linear" / f"{version}.py")
    kind = getattr(library, f"WQLinear_{version.upper()}")

    def tensors_of(module: str, weight: Tensor) -> Tensors:
        made = Quantized(weight, 4, GROUP, sym=False)
        scales, zeros = torch.from_numpy(made.scales).float(), torch.from_numpy(made.zeros).float()
        if version == "gemm":
            scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
        held = kind.from_linear(linear_of(made.weight()), 4, GROUP, scales=scales, zeros=zeros)
        return {"qweight": held.qweight, "qzeros": held.qzeros, "scales": held.scales}

    return tensors_of


def by_compressed_tensors(libraries: Path, schemes: Mapping[str, Mapping[str, Any]]) -> Callable[..., Tensors | None]:
    """`schemes`: the part of a module's name that each is for; other modules stay floats."""
    sys.path.insert(0, str(libraries))
    from compressed_tensors.compressors import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def tensors_of(module: str, weight: Tensor) -> Tensors | None:
        fields = next((dict(found) for part, found in schemes.items() if part in module), None)
        if fields is None:
            return None
        inputs_too = fields.pop("input_activations", None)
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(
            targets=["Linear"],
            weights=args,
            input_activations=None if inputs_too is None else QuantizationArgs(**inputs_too),
        )
        made = Quantized(weight, args.num_bits, args.group_size or weight.shape[1], sym=args.symmetric)
        state = {
            "weight": made.weight(),
            "weight_scale": torch.from_numpy(made.scales).bfloat16().float(),
            "weight_zero_point": (torch.from_numpy(made.zeros) - (1 << args.num_bits - 1)).to(torch.int8),
        }
        kind = PackedQuantizationCompressor if inputs_too is None else IntQuantizationCompressor
        stored: Tensors = kind.compress(state, scheme)
        stored["weight_scale"] = stored["weight_scale"].bfloat16()
        return stored

    return tensors_of


def by_bitsandbytes(libraries: Path, source: Path) -> None:
    """As transformers saves it; what the library dequantizes is what the tests' reading gives, in its fp16."""
    sys.path.insert(0, str(libraries))
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    kinds = {
        "int8": {"load_in_8bit": True},
        "nf4": four | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4": four | {"bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": ["model.layers.1.self_attn.v_proj"]},
    }
    for kind, fields in kinds.items():
        target = DATA / f"bitsandbytes-{kind}"
        shutil.rmtree(target, ignore_errors=True)
        config = BitsAndBytesConfig(**fields)
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=config, device_map="cpu", dtype=torch.float16
        )
        model.save_pretrained(target)
        tidy(target)
        if kind != "int8":
            module = "model.layers.0.mlp.down_proj"
            held, stored = model.get_submodule(module).weight, load_file(target / "model.safetensors")
            parts = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.")}
            assert torch.equal(dequantize_4bit(held.data, held.quant_state), read_bitsandbytes(parts).half())


def tidy(folder: Path) -> None:
    """Keep what a checkpoint needs, less the tokenizer; the configuration in lines."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    text = json.dumps(json.loads((folder / "config.json").read_text()), indent=1)
    (folder / "config.json").write_text(text + "\n")


def group_of(fields: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
    weights = {key: value for key, value in fields.items() if key != "input_activations"}
    return {"targets": targets, "weights": weights, "input_activations": fields.get("input_activations")}


W4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
W3 = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "channel"}
W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | {
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
}


def main(libraries: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    of_attention = ["re:.*self_attn.*"]
    cases = {
        "autogptq": (gptq, by_autogptq(libraries)),
        "autoawq-gemm": (awq | {"version": "gemm"}, by_autoawq(libraries, "gemm")),
        "autoawq-gemv": (awq | {"version": "gemv"}, by_autoawq(libraries, "gemv")),
        # One projection of the second layer stays floats; attention has four bits, the MLP three.
        "compressed-tensors-mixed": (
            packed
            | {
                "config_groups": {"group_0": group_of(W4, of_attention), "group_1": group_of(W3, ["Linear"])},
                "ignore": ["lm_head", "re:.*1.self_attn.v_proj"],
            },
            by_compressed_tensors(libraries, {"0.self_attn": W4, "q_proj": W4, "k_proj": W4, "o_proj": W4, "mlp": W3}),
        ),
        "compressed-tensors-w8a8": (
            packed | {"format": "int-quantized", "config_groups": {"group_0": group_of(W8A8, ["Linear"])}},
            by_compressed_tensors(libraries, {"": W8A8}),
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        source = base(Path(folder) / "base", tie_word_embeddings=True)
        for name, (config, tensors_of) in cases.items():
            shutil.rmtree(DATA / name, ignore_errors=True)
            made = convert(source, DATA / name, config, tensors_of)
            tensors = load_file(made / "model.safetensors")
            kept = {n: t.bfloat16() if t.dtype == torch.float32 and "proj" not in n else t for n, t in tensors.items()}
            save_file(kept, made / "model.safetensors", {"format": "pt"})
            tidy(made)
        by_bitsandbytes(libraries, source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
