"""AWQ checkpoints against a reading bit by bit, in every version; one line for what is damaged or not supported."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import (
    DOWN,
    Damage,
    Quantized,
    awq_tensors,
    base,
    committed,
    convert,
    on,
    read_awq,
    read_awq_fast,
    with_config,
)
from safetensors.torch import load_file, save_file

from lorasrv.errors import CorruptModel, ModelError, UnsupportedModel
from lorasrv.models.loader import open_checkpoint
from sgmv_kernels.formats.weight_codes import INT4_LEVELS

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_a_file_packed_by_autoawq(tmp_path: Path, version: str) -> None:
    folder = committed(f"autoawq-{version}", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(modules) == 2 * 7
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert checkpoint.packing is not None
        assert (checkpoint.packing.method, checkpoint.packing.bits) == ("awq", (4,))
        for module in modules:
            want = read_awq({k: tensors[f"{module}.{k}"] for k in ("qweight", "qzeros", "scales")}, 32, version)
            codes = checkpoint.codes(f"{module}.weight")
            assert codes is not None
            assert torch.equal(codes.dequantize(), want)
            assert (codes.levels, codes.group) == (INT4_LEVELS, 32)


def test_a_file_packed_for_gemv_fast(tmp_path: Path) -> None:
    folder = committed("autoawq-gemv_fast", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert len(checkpoint.packing.bits) == 1
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", DOWN):
            want = read_awq_fast({k: tensors[f"{module}.{k}"] for k in ("qweight", "qzeros", "scales")}, 32)
            codes = checkpoint.codes(f"{module}.weight")
            assert torch.equal(codes.dequantize(), want)
            assert (codes.levels, codes.group, codes.minima.dtype) == (INT4_LEVELS, 32, torch.float16)
    tensors[f"{DOWN}.qzeros"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with (
        closing(open_checkpoint(str(folder))) as checkpoint,
        pytest.raises(CorruptModel, match="qzeros holds NaN or infinity"),
    ):
        checkpoint.codes(f"{DOWN}.weight")


def test_the_outputs_of_a_word_lie_in_their_order(tmp_path: Path) -> None:
    """All eight of a word differ, and so do their zeros."""
    folder = base(tmp_path / "floats")
    made = Quantized(load_file(folder / "model.safetensors")[f"{DOWN}.weight"], 4, 32, sym=False)
    made.fields[:8, 0], made.zeros[:8, 0] = range(8), range(8, 16)
    tensors = awq_tensors(made)
    assert int(tensors["qweight"][0, 0]) & 0xFFFFFFFF == 0x75316420
    assert int(tensors["qzeros"][0, 0]) & 0xFFFFFFFF == 0xFDB9ECA8
    convert(folder, tmp_path / "m", CONFIG, lambda m, w: tensors if m == DOWN else None)
    with closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{DOWN}.weight"), made.weight())


@pytest.mark.parametrize(("version", "group"), [("gemm", 64), ("gemm", -1), ("gemv", 64), ("gemv", 128)])
def test_other_groups(tmp_path: Path, version: str, group: int) -> None:
    folder = base(tmp_path / "floats")
    made = Quantized(
        load_file(folder / "model.safetensors")[f"{DOWN}.weight"], 4, 128 if group < 0 else group, sym=False
    )
    names = {"w_bit": 4, "q_group_size": group, "version": version.upper()}
    tensors = awq_tensors(made, version)
    convert(folder, tmp_path / "m", {"quant_method": "awq"} | names, lambda m, w: tensors if m == DOWN else None)
    with closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{DOWN}.weight"), made.weight())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": "gemv_faster"}, "AWQ in version 'gemv_faster' is not supported, only gemm, gemv, gemv_fast"),
        ({"version": "Marlin"}, "AWQ in version 'marlin'"),
        ({"bits": 3}, "AWQ of 3 bits"),
        ({"group_size": 48}, "groups of 48 do not divide its"),
        ({"group_size": 0}, "groups of 0 do not divide its"),
        ({"version": 7}, "version must be a string, not 7"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = committed("autoawq-gemm", tmp_path / "m")
    with_config(folder, quantization_config=CONFIG | config)
    with pytest.raises(UnsupportedModel if "must" not in message else CorruptModel, match=message):
        read_all(folder)


def read_all(folder: Path) -> None:
    with closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on("qweight", lambda t: t[:-1]), r"down_proj\.weight is \[64, 127\], not \[64, 128\]"),
        (on("qweight", lambda t: t.to(torch.int64)), "qweight is I64, not I32"),
        (on("qzeros", lambda t: None), r"lacks .*down_proj\.qzeros"),
        (on("qzeros", lambda t: t[1:]), r"qzeros is \[3, 8\], not \[4, 8\]"),
        (on("scales", lambda t: t * torch.nan), "scales holds NaN or infinity"),
        (on("scales", lambda t: t[:, 1:]), r"scales is \[4, 63\], not \[4, 64\]"),
    ],
)
def test_damaged_modules(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = committed("autoawq-gemm", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        read_all(folder)
