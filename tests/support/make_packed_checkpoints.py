"""Make the committed checkpoints of tests/lorasrv/models/loader/packed/data with the libraries' own packing code.

    python tests/support/make_packed_checkpoints.py LIBRARIES [NAME ...]

LIBRARIES is a folder into which these were unpacked, without their dependencies: the wheels of auto-gptq 0.7.1,
compressed-tensors 0.20.0, loguru 0.7.3 and bitsandbytes 0.50.2, and the sources of autoawq 0.2.9 and hqq 0.2.8.post1.
With names, only these are made. With transformers 5, the packages of AutoGPTQ and AutoAWQ cannot be imported, so their
packing files are loaded separately, with stand-ins for their packages; likewise those of HQQ. GPTQModel has no wheel
and was not built: `packed_checkpoints.py` writes its layouts (gptq_v2, zeros with borrow, act-order, dynamic, other
words) from their description, and also that of EETQ, which has no wheel either. The committed files were made with
torch 2.13.0 and transformers 5.23.0.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from packed_checkpoints import DATA, Quantized, Tensors, base, convert, read_bitsandbytes, read_hqq
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
        # The library does not clamp, so the weight must be one that the codes represent exactly.
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
    kind = getattr(library, {"gemv_fast": "WQLinear_GEMVFast"}.get(version, f"WQLinear_{version.upper()}"))

    def tensors_of(module: str, weight: Tensor) -> Tensors:
        made = Quantized(weight, 4, GROUP, sym=False)
        scales, zeros = torch.from_numpy(made.scales).float(), torch.from_numpy(made.zeros).float()
        if version == "gemm":
            scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
        held = kind.from_linear(linear_of(made.weight()), 4, GROUP, scales=scales, zeros=zeros)
        return {"qweight": held.qweight, "qzeros": held.qzeros, "scales": held.scales}

    return tensors_of


def by_hqq(libraries: Path) -> Callable[[str, Tensor], Tensors]:
    """Pack the first layer with the library's defaults except the axis, in 4 bits; the second with other bits, and one
    projection with groups across rows.
    """
    source = next(libraries.glob("hqq-*")) / "hqq" / "core"
    for name in ("hqq", "hqq.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["termcolor"] = types.ModuleType("termcolor")
    vars(sys.modules["termcolor"])["colored"] = str
    for name in ("bitpack", "utils", "optimize", "quantize"):
        load(f"hqq.core.{name}", source / f"{name}.py")
    library, encode = sys.modules["hqq.core.quantize"], sys.modules["hqq.core.utils"].encode_safetensor_type

    def tensors_of(module: str, weight: Tensor) -> Tensors:
        bits = 4 if ".0." in module else {"q_proj": 8, "k_proj": 3, "v_proj": 2, "o_proj": 1}.get(module[-6:], 4)
        axis = 0 if module.endswith("1.mlp.up_proj") else 1
        fields, meta = library.Quantizer.quantize(
            weight, bits, group_size=64 if axis else 32, axis=axis, compute_dtype=torch.float16, device="cpu"
        )
        halves = {name: value.half() if name in ("scale", "zero") else value for name, value in meta.items()}
        want = library.Quantizer.dequantize(fields, halves | {"compute_dtype": torch.float32})
        stored = {"W_q": fields, **{name: encode(value) for name, value in halves.items()}}
        assert torch.equal(want, read_hqq(stored)), module
        return {name: value for name, value in stored.items() if isinstance(value, Tensor)}

    return tensors_of


def by_compressed_tensors(libraries: Path, schemes: Mapping[str, Mapping[str, Any]]) -> Callable[..., Tensors | None]:
    """Pack modules by `schemes`, whose keys are parts of module names; other modules stay floats."""
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
    """Save as transformers does, and check that the library dequantizes to the same weights as the tests, in fp16."""
    sys.path.insert(0, str(libraries))
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
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
    """Keep only the files of a checkpoint, without the tokenizer; format the configuration in lines."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    text = json.dumps(json.loads((folder / "config.json").read_text()), indent=1)
    (folder / "config.json").write_text(text + "\n")


def group_of(fields: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
    weights = {key: value for key, value in fields.items() if key != "input_activations"}
    return {"targets": targets, "weights": weights, "input_activations": fields.get("input_activations")}


HQQ = {"weight_quant_params": {"nbits": 4, "channel_wise": True, "group_size": 64, "axis": 1}}
W4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
W3 = {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "channel"}
W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | {
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
}


def main(libraries: Path, names: Collection[str]) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    awq = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    of_attention = ["re:.*self_attn.*"]
    cases: dict[str, tuple[dict[str, Any], Callable[[], Callable[..., Tensors | None]]]] = {
        "autogptq": (gptq, lambda: by_autogptq(libraries)),
        "autoawq-gemm": (awq | {"version": "gemm"}, lambda: by_autoawq(libraries, "gemm")),
        "autoawq-gemv": (awq | {"version": "gemv"}, lambda: by_autoawq(libraries, "gemv")),
        "autoawq-gemv_fast": (awq | {"version": "gemv_fast"}, lambda: by_autoawq(libraries, "gemv_fast")),
        "hqq": ({"quant_method": "hqq", "quant_config": HQQ, "skip_modules": ["lm_head"]}, lambda: by_hqq(libraries)),
        # One projection of the second layer stays floats; attention has four bits, the MLP three.
        "compressed-tensors-mixed": (
            packed
            | {
                "config_groups": {"group_0": group_of(W4, of_attention), "group_1": group_of(W3, ["Linear"])},
                "ignore": ["lm_head", "re:.*1.self_attn.v_proj"],
            },
            lambda: by_compressed_tensors(
                libraries, {"0.self_attn": W4, "q_proj": W4, "k_proj": W4, "o_proj": W4, "mlp": W3}
            ),
        ),
        "compressed-tensors-w8a8": (
            packed | {"format": "int-quantized", "config_groups": {"group_0": group_of(W8A8, ["Linear"])}},
            lambda: by_compressed_tensors(libraries, {"": W8A8}),
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        source = base(Path(folder) / "base", tie_word_embeddings=True)
        for name, (config, library) in cases.items():
            if names and name not in names:
                continue
            shutil.rmtree(DATA / name, ignore_errors=True)
            made = convert(source, DATA / name, config, library())
            tensors = load_file(made / "model.safetensors")
            kept = {n: t.bfloat16() if t.dtype == torch.float32 and "proj" not in n else t for n, t in tensors.items()}
            save_file(kept, made / "model.safetensors", {"format": "pt"})
            tidy(made)
        if not names or any(name.startswith("bitsandbytes") for name in names):
            by_bitsandbytes(libraries, source)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
