"""EETQ checkpoints, packed number by number as EETQ's four steps do it; one line for damage."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from packed_checkpoints import DOWN, Damage, Tensors, base, convert, eetq_tensors, on
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorasrv.errors import ModelError
from lorasrv.models.loader import open_checkpoint
from sgmv_kernels.formats.weight_codes import INT8_LEVELS

CONFIG = {"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": ["lm_head"]}


def eetq(root: Path, *, newer: bool = False) -> Path:
    """A checkpoint whose linears but the head are packed; newer files have another name for the bytes."""

    def tensors_of(module: str, weight: Tensor) -> Tensors | None:
        made = None if module == "lm_head" else eetq_tensors(weight)
        return {"weight" if newer and end == "qweight" else end: t for end, t in made.items()} if made else None

    return convert(base(root / "floats"), root / "m", CONFIG, tensors_of)


@pytest.mark.parametrize("newer", [False, True])
def test_the_four_steps_are_undone(tmp_path: Path, newer: bool) -> None:
    folder = eetq(tmp_path, newer=newer)
    floats = load_file(tmp_path / "floats" / "model.safetensors")
    with closing(open_checkpoint(str(folder))) as checkpoint:
        packing = checkpoint.packing
        assert packing is not None
        assert (packing.method, packing.bits, packing.mean_bits, packing.rounding) == ("eetq", (8,), 8, "")
        for name in (name for name in floats if "proj" in name):
            codes, weight = checkpoint.codes(name), floats[name].float()
            scales = (weight.abs().amax(1) / 128).half().float()[:, None]
            assert codes is not None
            assert codes.levels == INT8_LEVELS
            assert torch.equal(codes.dequantize(), (weight / scales).round().clamp(-128, 127) * scales)
            assert torch.equal(checkpoint.tensor(name), codes.dequantize())
        assert checkpoint.codes("lm_head.weight") is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (on("weight_scales", lambda t: t * torch.nan), "weight_scales holds NaN or infinity"),
        (on("weight_scales", lambda t: t[:-1]), r"weight_scales is \[63\], not \[64\]"),
        (on("weight_scales", lambda t: None), r"1 of .* tensors are missing: .*down_proj\.weight"),
        (on("qweight", lambda t: None), r"lacks .*down_proj\.weight"),
        (on("qweight", lambda t: t.short()), "qweight is I16, not I8"),
        (on("qweight", lambda t: t[:-1]), r"down_proj\.weight is \[64, 127\], not \[64, 128\]"),
    ],
)
def test_damaged_modules(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = eetq(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message), closing(open_checkpoint(str(folder))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")
