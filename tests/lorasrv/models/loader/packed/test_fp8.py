"""FP8 checkpoints with every kind of scale, written from their description; one line for what is damaged."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import DOWN, Tensors, base, convert
from torch import Tensor

from lorasrv.errors import CorruptModel
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.quantization import StoredWeights, select_format
from lorasrv.models.quantization.rounding import round_symmetric

BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 32]}
KINDS: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "blocks": (BLOCKS, "weight_scale_inv", [2, 4]),
    "one": ({"quant_method": "fp8"}, "weight_scale", []),
    "outputs": ({"quant_method": "fbgemm_fp8"}, "weight_scale", [64, 1]),
    "compressed blocks": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [48, 32]}}},
        },
        "weight_scale",
        [2, 4],
    ),
    "compressed": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "weight_scale", [64, 1]),
}
"""Configuration, name of the scale, its shape for a weight of 64 outputs and 128 inputs."""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("packed") / "floats")


def write(floats: Path, target: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    return convert(floats, target, config, lambda module, weight: tensors if module == DOWN else None)


def random_weight(name: str, shape: list[int]) -> tuple[Tensors, Tensor]:
    """The tensors of a module, and its weight, a number at a time."""
    values = torch.randn(64, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) * 0.01 + 0.001
    rows = {0: 1, 64: 64, 2: 2}[shape[0] if shape else 0]
    columns = shape[1] if len(shape) == 2 else 1
    weight = torch.empty(64, 128)
    spread = scales.reshape(rows, columns)
    for o in range(64):
        for h in range(128):
            weight[o, h] = values[o, h].float() * spread[min(o // 48, 1) if rows == 2 else o % rows, h // 32 % columns]
    return {"weight": values, name: scales}, weight


@pytest.mark.parametrize("kind", KINDS)
def test_values_times_scales(floats: Path, tmp_path: Path, kind: str) -> None:
    config, name, shape = KINDS[kind]
    tensors, want = random_weight(name, shape)
    folder = write(floats, tmp_path / "m", config, tensors)
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{DOWN}.weight"), want)
        codes = checkpoint.codes(f"{DOWN}.weight")
        assert codes is not None
        assert torch.equal(codes.codes, round_symmetric(want, 32).codes)
        assert (codes.dequantize() - want).norm() < 0.007 * want.norm()
        method = "compressed-tensors" if kind.startswith("compressed") else "fp8"
        assert checkpoint.packing is not None
        assert (checkpoint.packing.method, checkpoint.packing.bits) == (method, (8,))
        served = select_format(StoredWeights.of(checkpoint))[0]
        assert served == ("compressed-tensors" if kind.startswith("compressed") else "int8")


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (BLOCKS, {"weight_scale_inv": None}, "has FP8 weights without weight_scale"),
        (
            BLOCKS,
            {"weight_scale_inv": torch.rand(3, 4)},
            r"weight_scale_inv is \[3, 4\], which does not fit a weight of",
        ),
        ({"quant_method": "fp8"}, {"weight_scale_inv": torch.rand(2, 4)}, r"is \[2, 4\], which does not fit"),
        (BLOCKS, {"weight_scale_inv": torch.full((2, 4), torch.nan)}, "weight_scale_inv holds NaN or infinity"),
        (
            BLOCKS,
            {"weight": torch.full((64, 128), -torch.nan).to(torch.float8_e4m3fn)},
            "weight holds NaN or infinity",
        ),
        (BLOCKS | {"weight_block_size": ["48"]}, {}, "weight_block_size must be a list of whole numbers"),
    ],
)
def test_damaged_modules(
    floats: Path, tmp_path: Path, config: dict[str, Any], change: dict[str, Tensor | None], message: str
) -> None:
    tensors, _ = random_weight("weight_scale_inv", [2, 4])
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    folder = write(floats, tmp_path / "m", config, changed)
    with pytest.raises(CorruptModel, match=message), closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")
