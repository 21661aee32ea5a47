"""HQQ checkpoints that the library has packed, against a reading row by row; one line for damage."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from packed_checkpoints import DOWN, Damage, Tensors, committed, on, read_hqq
from safetensors.torch import load_file, save_file

from lorasrv.errors import CorruptModel, ModelError
from lorasrv.models.loader import open_checkpoint

ATTENTION = {"q_proj": (8, 256), "k_proj": (3, 11), "v_proj": (2, 11), "o_proj": (1, 11)}
"""Bits of the second layer's projections in the file, and levels of their codes."""
ACROSS = "model.layers.1.mlp.up_proj"


def parts_of(tensors: Tensors, module: str) -> Tensors:
    return {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}


def test_files_packed_by_the_library(tmp_path: Path) -> None:
    folder = committed("hqq", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]
    assert len(modules) == 14
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert checkpoint.packing is not None
        assert (checkpoint.packing.method, checkpoint.packing.bits) == ("hqq", (1, 2, 3, 4, 8))
        assert checkpoint.packing.rounding.startswith("stored in 8 bits")
        for module in modules:
            want, codes = read_hqq(parts_of(tensors, module)), checkpoint.codes(f"{module}.weight")
            assert codes is not None
            assert torch.equal(checkpoint.tensor(f"{module}.weight"), want), module
            if module == ACROSS:
                assert 0 < (codes.dequantize() - want).norm() < 0.007 * want.norm()
                continue
            # (q - zero) * scale and q * scale - zero * scale differ in fp32's last bits.
            assert float((codes.dequantize() - want).abs().max()) < 1e-6 * float(want.abs().max()), module
            assert codes.group == 64
            end = module.rpartition(".")[2]
            levels = ATTENTION[end][1] if end in ATTENTION and ".1." in module else 16
            assert codes.levels == levels, module


def test_without_groups_a_row_is_one(tmp_path: Path) -> None:
    folder = committed("hqq", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert int(tensors.pop(f"{name}.group_size")) == tensors[f"{name}.shape"][1] == 64
    before = {**parts_of(tensors, name), "group_size": torch.tensor(64)}
    save_file(tensors, folder / "model.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), read_hqq(before))


def test_bytes_in_another_dtype(tmp_path: Path) -> None:
    """`view_as_float`: the same bytes."""
    folder = committed("hqq", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".W_q")]:
        tensors[name] = tensors[name].view(torch.float16)
    save_file(tensors, folder / "other.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        want = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    (folder / "other.safetensors").rename(folder / "model.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in want.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on("scale", lambda t: t * torch.nan), r"scale holds NaN or infinity"),
        (on("zero", lambda t: t * torch.inf), r"zero holds NaN or infinity"),
        (on("scale", lambda t: t[:-1]), r"scale is \[127, 1\], not \[128, 1\]"),
        (on("scale", lambda t: t.to(torch.uint8)), r"scale is U8, not F16 or BF16 or F32"),
        (on("scale", lambda t: None), "HQQ without scales as floats"),
        (on("W_q", lambda t: t[:-1]), r"W_q is \[63, 64\], which does not fit 128 rows of 64 fields"),
        (on("W_q", lambda t: t.short()), r"W_q is \[64, 64\], which does not fit"),
        (on("W_q", lambda t: t.view(-1)), r"which are not 2 dimensions"),
        (on("nbits", lambda t: t * 0 + 5), "HQQ of 5 bits"),
        (on("nbits", lambda t: t.float() + 0.5), r"nbits is \[4\.5\], not whole numbers"),
        (on("nbits", lambda t: None), r"lacks .*nbits"),
        (on("axis", lambda t: t + 2), r"axis is 3, not 0 or 1"),
        (on("group_size", lambda t: t * 0), "groups of 0 do not divide"),
        (on("shape", lambda t: t[:1]), r"shape is \[1\], not \[2\]"),
        (on("shape", lambda t: t.flip(0)), r"down_proj\.weight is \[128, 64\], not \[64, 128\]"),
    ],
)
def test_damaged_modules(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = committed("hqq", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught, closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")
    assert isinstance(caught.value, CorruptModel) or "supported" in str(caught.value)
