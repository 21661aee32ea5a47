"""Checkpoints that transformers saved with bitsandbytes, against a reading number by number; one line for damage."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import DOWN, Damage, Tensors, committed, on, read_bitsandbytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorasrv.errors import ModelError, UnsupportedModel
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.quantization.rounding import byte_table, round_symmetric
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS

LINEARS = {"int8": 14, "nf4": 14, "fp4": 13}


def parts_of(tensors: Tensors, module: str) -> Tensors:
    return {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}


@pytest.mark.parametrize("kind", LINEARS)
def test_files_saved_by_the_library(tmp_path: Path, kind: str) -> None:
    folder = committed(f"bitsandbytes-{kind}", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    end = ".SCB" if kind == "int8" else ".weight.absmax"
    modules = [name.removesuffix(end) for name in tensors if name.endswith(end)]
    assert len(modules) == LINEARS[kind]
    with closing(open_checkpoint(str(folder))) as checkpoint:
        packing = checkpoint.packing
        assert packing is not None
        assert (packing.method, packing.bits) == ("bitsandbytes", (8,) if kind == "int8" else (4,))
        assert (packing.rounding == "", packing.mean_bits) == (kind == "int8", 8 if kind == "int8" else 4)
        changes = []
        for module in modules:
            want, name = read_bitsandbytes(parts_of(tensors, module)), f"{module}.weight"
            torch.testing.assert_close(checkpoint.tensor(name), want, rtol=3e-7, atol=0)
            codes = checkpoint.codes(name)
            assert codes is not None
            if kind == "int8":
                assert codes.levels == INT8_LEVELS
                assert torch.equal(codes.dequantize(), checkpoint.tensor(name))
            else:
                assert (codes.levels, codes.group) == (INT4_LEVELS, 64)
                changes.append(torch.stack(((codes.dequantize() - want).norm(), want.norm())))
        assert (checkpoint.codes("model.layers.1.self_attn.v_proj.weight") is None) == (kind == "fp4")
        if changes:
            change, norm = torch.stack(changes).norm(dim=0)
            assert 0.003 < change / norm < 0.005, "the rms that the start states"


@pytest.mark.parametrize("stored", [torch.tensor(3, dtype=torch.uint8), torch.tensor([1]), torch.tensor([0, 0])])
def test_weights_in_tiles_are_refused_by_name(tmp_path: Path, stored: Tensor) -> None:
    """bitsandbytes refuses them, too."""
    folder = committed("bitsandbytes-int8", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{DOWN}.weight_format": stored}, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModel, match=r"down_proj\.weight_format is \[.*\], and only weights in rows \(\[0\]\)"
    ):
        open_checkpoint(str(folder))


def test_blocks_may_span_rows(tmp_path: Path) -> None:
    """And the first code of a byte is in its upper half."""
    folder = committed("bitsandbytes-fp4", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = f"{DOWN}.weight.quant_state.bitsandbytes__fp4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 96}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"{DOWN}.weight.absmax"] = torch.rand(-(-64 * 128 // 96))
    save_file(tensors, folder / "model.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        want = read_bitsandbytes(parts_of(tensors, DOWN))
        assert torch.equal(checkpoint.tensor(f"{DOWN}.weight"), want)
        codes = checkpoint.codes(f"{DOWN}.weight")
        assert codes is not None
        assert torch.equal(codes.codes, round_symmetric(want, 32).codes)
        assert checkpoint.packing is not None
        assert checkpoint.packing.rounding.startswith("stored in 8 bits, with a scale for every 32 inputs")
        assert 4 < checkpoint.packing.mean_bits < 8


def test_tables_of_bytes() -> None:
    """The published values of NF4; whole numbers are their own table."""
    nf4 = (-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0)
    nf4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1)
    table, unit = byte_table(nf4)
    assert table == (-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112)
    assert unit == pytest.approx(1 / 112.05)
    doubled = tuple(float(n) for n in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
    table, unit = byte_table(doubled)
    assert [n * unit for n in table] == pytest.approx(doubled)


def state_is(**fields: Any) -> Damage:
    def apply(tensors: Tensors) -> None:
        name = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | fields
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return apply


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on(STATE, lambda t: t[:-3]), "bitsandbytes__nf4 is not valid JSON"),
        (on(STATE, lambda t: t * 0 + 255), "bitsandbytes__nf4 is not valid JSON"),
        (state_is(quant_type="nf5"), "is not of a known kind: nf4, fp4"),
        (state_is(shape=[64, "128"]), "lacks shape, blocksize or nested_offset"),
        (state_is(shape=[64, 64]), r"down_proj\.weight is \[64, 64\], not \[64, 128\]"),
        (state_is(blocksize=0), "lacks shape, blocksize or nested_offset"),
        (state_is(blocksize=32), r"absmax is \[128\], not \[256\]"),
        (state_is(nested_offset=None), "lacks shape, blocksize or nested_offset"),
        (on("weight", lambda t: t[:-1]), r"weight has 4095 bytes, not 4096"),
        (on("weight.absmax", lambda t: t.float()), "absmax is F32, not U8"),
        (on("weight.absmax", lambda t: None), r"lacks .*weight\.absmax"),
        (on("weight.quant_map", lambda t: t[:8]), r"quant_map is \[8\], not \[16\]"),
        (on("weight.nested_absmax", lambda t: t * torch.nan), "absmax holds NaN or infinity"),
        (on("weight.quant_map", lambda t: t * torch.inf), "quant_map holds NaN or infinity"),
        (on("weight.quant_map", lambda t: t * 0), "quant_map holds only zeros"),
    ],
)
def test_damaged_modules(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = committed("bitsandbytes-nf4", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message), closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on("SCB", lambda t: t[:-1]), r"SCB is \[63\], not \[64\]"),
        (on("SCB", lambda t: t * torch.inf), "SCB holds NaN or infinity"),
        (on("weight", lambda t: t.float()), "weight is F32, not I8"),
    ],
)
def test_damaged_bytes(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = committed("bitsandbytes-int8", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message), closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")
