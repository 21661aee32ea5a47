"""Every tensor of a quantized module, damaged in every way, for every format: refused in one line that names it, never
read as other weights.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from packed_checkpoints import DATA, DOWN, Tensors, base, committed, convert, eetq_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorasrv.errors import ModelError
from lorasrv.models.loader import open_checkpoint

OPTIONAL = {"weight_zero_point", "weight_g_idx", "g_idx"}
"""Ends of names without which a module is another one, but whole."""
UNREAD = {
    "weight_format",
    "group_size",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "packing",
    "unpack_view_dtype",
}
"""Ends of names that say what the others say, too, or what is of no use."""
MADE = ("eetq", "fp8-blocks", "fp8-tensor")
KINDS = (*sorted(folder.name for folder in DATA.iterdir()), *MADE)


def _fp8(weight: Tensor, blocks: bool) -> Tensors:
    scale = {"weight_scale_inv": torch.rand(-(-len(weight) // 32), weight.shape[1] // 32) + 0.1}
    return {"weight": weight.to(torch.float8_e4m3fn)} | (scale if blocks else {"weight_scale": torch.tensor(0.5)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> a checkpoint that can be read; made once, not to be changed."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            if kind in MADE:
                config = {"quant_method": kind.partition("-")[0]}
                config |= {"weight_block_size": [32, 32]} if kind == "fp8-blocks" else {}
                tensors_of = eetq_tensors if kind == "eetq" else partial(_fp8, blocks=kind == "fp8-blocks")
                made[kind] = convert(
                    base(root / "floats"), root / "m", config, lambda m, w: _but_head(m, w, tensors_of)
                )
            else:
                made[kind] = committed(kind, root / "m")
        return made[kind]

    return make


def _but_head(module: str, weight: Tensor, tensors_of: Callable[[Tensor], Tensors]) -> Tensors | None:
    return None if "head" in module else tensors_of(weight)


def damages(tensor: Tensor) -> dict[str, Tensor | None]:
    """What may have become of a tensor, by name; None if it is missing."""
    found: dict[str, Tensor | None] = {"missing": None, "another dtype": tensor.double()}
    if tensor.dim():
        found |= {"torn": tensor[:-1], "longer": torch.cat((tensor, tensor[-1:])), "deeper": tensor[None]}
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        found["narrower"] = tensor[:, :-1]
    if tensor.is_floating_point():
        for name, value in (("NaN", torch.nan), ("infinite", torch.inf)):
            if value == torch.inf and tensor.dtype == torch.float8_e4m3fn:
                continue
            changed = tensor.clone()
            changed.view(-1)[0] = value
            found[name] = changed
    return found


def read(folder: Path) -> tuple[Tensor, Tensor]:
    with closing(open_checkpoint(str(folder))) as checkpoint:
        codes = checkpoint.codes(f"{DOWN}.weight")
        assert codes is not None
        return codes.dequantize(), checkpoint.tensor(f"{DOWN}.weight")


def message(folder: Path) -> str:
    """What is said of a damaged checkpoint; "" if it is read."""
    try:
        read(folder)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_tensor_is_named(whole: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    tensors = load_file(whole(kind) / "model.safetensors")
    for file in whole(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    read(tmp_path)
    passed = []
    for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        for what, changed in damages(tensors[name]).items():
            end = name.removeprefix(f"{DOWN}.")
            if end in UNREAD or (what == "missing" and end in OPTIONAL):
                continue
            damaged = {other: tensor for other, tensor in tensors.items() if other != name}
            damaged |= {} if changed is None else {name: changed.contiguous()}
            save_file(damaged, tmp_path / "model.safetensors")
            said = message(tmp_path)
            if DOWN not in said or "\n" in said:
                passed.append((end, what, said))
    assert not passed


@pytest.mark.parametrize(
    ("kind", "end"), [("autogptq", "g_idx"), ("compressed-tensors-mixed", "weight_shape"), ("hqq", "shape")]
)
@pytest.mark.parametrize("value", [-1, 10**6])
def test_numbers_out_of_range(whole: Callable[[str], Path], tmp_path: Path, kind: str, end: str, value: int) -> None:
    for file in whole(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{DOWN}.{end}"].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=DOWN):
        read(tmp_path)
