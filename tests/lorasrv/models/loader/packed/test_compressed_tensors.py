"""Checkpoints of compressed-tensors against a reading bit by bit; one line for what is damaged or not supported."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import (
    DOWN,
    Damage,
    Quantized,
    Tensors,
    base,
    committed,
    convert,
    on,
    pack,
    read_compressed,
    with_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorasrv.errors import ModelError
from lorasrv.models.loader import open_checkpoint
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS

QUERIES = "model.layers.1.self_attn.q_proj"
KINDS = ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("packed") / "floats")


def config_of(strategy: str = "group", **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "int", "strategy": strategy} | weights, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def tensors_of(made: Quantized, *, padded: bool = False, dtype: torch.dtype = torch.float16) -> Tensors:
    """As the library has them; `padded`: as it packed in 2025, with whole fields in every word."""
    bits, each = made.bits, 32 // made.bits

    def packed(fields: Any) -> Tensor:
        if not padded:
            return pack(fields, bits)
        filled = np.pad(fields, ((0, 0), (0, -fields.shape[1] % each))).reshape(len(fields), -1, each)
        shifts = np.arange(each) * bits
        return torch.from_numpy((filled << shifts).sum(-1).astype(np.uint32).view(np.int32))

    return {
        "weight_packed": packed(made.fields),
        "weight_shape": torch.tensor(made.fields.shape),
        "weight_scale": torch.from_numpy(made.scales).to(dtype),
        "weight_zero_point": packed(made.zeros.T).T.contiguous() if not padded else packed(made.zeros.T).T,
        "weight_g_idx": torch.from_numpy(made.groups_of.astype(np.int32)),
    }


def parts_of(tensors: Tensors, module: str) -> Tensors:
    return {kind: tensors[f"{module}.{kind}"] for kind in KINDS if f"{module}.{kind}" in tensors}


def read(folder: Path, module: str = DOWN) -> Any:
    with closing(open_checkpoint(str(folder))) as checkpoint:
        codes = checkpoint.codes(f"{module}.weight")
        assert codes is None or torch.equal(checkpoint.tensor(f"{module}.weight"), codes.dequantize())
        return codes


def test_a_file_of_several_groups_packed_by_the_library(tmp_path: Path) -> None:
    folder = committed("compressed-tensors-mixed", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    assert len(modules) == 2 * 7 - 1
    found = set()
    for module in modules:
        bits = 3 if "mlp" in module else 4
        codes = read(folder, module)
        assert torch.equal(codes.dequantize(), read_compressed(parts_of(tensors, module), bits)), module
        found.add((codes.levels, codes.group))
    # A row of three bits has one scale; its inputs are 64 and 128.
    assert found == {(INT4_LEVELS, 32), (Q3H_LEVELS, 64), (Q3H_LEVELS, 128)}
    assert read(folder, "model.layers.1.self_attn.v_proj") is None


def test_a_file_of_whole_bytes_packed_by_the_library(tmp_path: Path) -> None:
    folder = committed("compressed-tensors-w8a8", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    assert len(modules) == 2 * 7
    for module in modules:
        codes = read(folder, module)
        assert torch.equal(codes.dequantize(), read_compressed(parts_of(tensors, module), 8))
        assert (codes.levels, codes.zeros, codes.scales.dtype) == (INT8_LEVELS, None, torch.float16)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_bits_densely_packed_and_padded(floats: Path, tmp_path: Path, bits: int, sym: bool, padded: bool) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], bits, 64, sym=sym)
    tensors = tensors_of(made, padded=padded)
    convert(
        floats,
        tmp_path / "m",
        config_of(num_bits=bits, symmetric=sym, group_size=64),
        lambda m, w: tensors if m == DOWN else None,
    )
    assert torch.equal(read(tmp_path / "m").dequantize(), made.weight())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_order_of_activations(floats: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 4, 32, act_order=True)
    tensors = tensors_of(made, dtype=dtype)
    tensors["weight_scale"] *= 1.01
    convert(floats, tmp_path / "m", config_of(num_bits=4), lambda m, w: tensors if m == DOWN else None)
    codes = read(tmp_path / "m")
    assert torch.equal(codes.dequantize(), read_compressed(tensors, 4))
    # fp16 has more digits than bf16.
    assert codes.scales.dtype == (torch.float16 if dtype == torch.bfloat16 else torch.float32)
    assert codes.order is not None


def test_zero_points_that_were_left_out_are_zero(floats: Path, tmp_path: Path) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 4, 32)
    tensors = tensors_of(made)
    del tensors["weight_zero_point"]
    tensors["weight_g_idx"][:] = -1
    config = config_of(num_bits=4, symmetric=False)
    convert(floats, tmp_path / "m", config, lambda m, w: tensors if m == DOWN else None)
    assert torch.equal(read(tmp_path / "m").dequantize(), made.weight())


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_bytes_with_zero_points(floats: Path, tmp_path: Path, strategy: str) -> None:
    shape = (1,) if strategy == "tensor" else (64, 1)
    tensors = {
        "weight": torch.randint(-128, 128, (64, 128), dtype=torch.int8),
        "weight_scale": torch.rand(shape),
        "weight_zero_point": torch.randint(-128, 128, shape, dtype=torch.int8),
    }
    config = config_of(strategy, num_bits=8, symmetric=False) | {"format": "int-quantized"}
    convert(floats, tmp_path / "m", config, lambda m, w: tensors if m == DOWN else None)
    want = (tensors["weight"].float() - tensors["weight_zero_point"].float()) * tensors["weight_scale"]
    assert torch.equal(read(tmp_path / "m").dequantize(), want)


def test_targets_by_name_go_before_those_by_class(floats: Path, tmp_path: Path) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 3, 32)
    config = config_of(num_bits=4)
    config["config_groups"]["of_down"] = {"weights": {"num_bits": 3}, "targets": ["re:.*down_proj$"]}
    tensors = tensors_of(made)
    convert(floats, tmp_path / "m", config, lambda m, w: tensors if m == DOWN else None)
    assert torch.equal(read(tmp_path / "m").dequantize(), made.weight())


def weights_are(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4} | fields}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"format": "marlin-24"},
            "in format 'marlin-24' is not supported, only pack-quantized, int-quantized and float",
        ),
        ({"format": "nvfp4-pack-quantized"}, "in format 'nvfp4-pack-quantized'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, r"transform_config \(rotations\) is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity 'sparse-24-bitmask'"),
        (weights_are(type="float"), "of 'float' weights is not supported, only of int"),
        (weights_are(strategy="block"), "with scales by 'block' is not supported"),
        (weights_are(num_bits=1), "of 1 bits"),
        (weights_are(num_bits=None), "num_bits must be a whole number"),
        ({"config_groups": {"g": {"targets": ["re:["]}}}, r"'\[' is no regular expression"),
        ({"config_groups": {"g": {"targets": ["lm_head"]}}}, "no config_groups are for model.layers.0"),
        ({"config_groups": {"g": {"targets": ["Linear"]}}}, "weights must be a table, not None"),
        ({"config_groups": {"g": {"targets": "Linear"}}}, "targets must be a list of strings"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = committed("compressed-tensors-mixed", tmp_path / "m")
    with_config(folder, quantization_config=config_of(num_bits=4) | config)
    with pytest.raises(ModelError, match=message) as raised:
        read(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on("weight_packed", lambda t: t[:, :-1]), r"weight_packed is \[64, 11\], not \[64, 13\]"),
        (on("weight_packed", lambda t: t[:-1]), r"weight_packed is \[63, 12\], not \[64, 12\]"),
        (on("weight_packed", lambda t: t.float()), "weight_packed is F32, not I32"),
        (on("weight_shape", lambda t: None), r"lacks .*down_proj\.weight_shape"),
        (on("weight_shape", lambda t: t + 1), r"down_proj\.weight is \[65, 129\], not \[64, 128\]"),
        (on("weight_scale", lambda t: None), r"lacks .*down_proj\.weight_scale"),
        (on("weight_scale", lambda t: t[1:]), r"weight_scale is \[63, 1\], not \[64, 1\]"),
        (on("weight_scale", lambda t: t[:, :0]), "weight_scale is empty"),
        (on("weight_scale", lambda t: t * torch.nan), "weight_scale holds NaN or infinity"),
        (on("weight_zero_point", lambda t: t[1:], QUERIES), r"weight_zero_point is \[7, 2\], not \[8, 2\]"),
    ],
)
def test_damaged_modules(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = committed("compressed-tensors-mixed", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        read(folder, DOWN if "zero_point" not in message else QUERIES)
