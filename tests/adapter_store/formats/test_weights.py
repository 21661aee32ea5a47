"""Weights as numpy arrays: values, layout and dtypes, without copies where the file allows it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors_bytes import tiled
from store_kit import BASE, Q0, build, check, flip, widen

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.weights import AdapterWeights, load_weights

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def load(path: Path, config: Any, data: bytes) -> AdapterWeights:
    path.write_bytes(data)
    return load_weights(path, check(config, data).spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_layout(dtype: str, tmp_path: Path) -> None:
    ranks = {"self_attn.q_proj": 4, "mlp.down_proj": 3}
    tensors = build.tensors(rank=ranks, modules=tuple(ranks), dtype=DTYPES[dtype])
    weights = load(
        tmp_path / "w",
        build.config(rank_pattern={"down_proj": 3}, target_modules=["q_proj", "down_proj"]),
        build.file(tensors),
    )
    assert weights.dtype == dtype
    assert list(weights) == [(m.layer, m.module) for m in weights.spec.modules]
    assert len(weights) == 4
    for (layer, module), lora in weights.items():
        stem = f"base_model.model.model.layers.{layer}.{module}"
        assert lora.a.dtype == {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
        assert lora.a.shape == (lora.rank, BASE.modules[module][0])
        assert lora.b.shape == (BASE.modules[module][1], lora.rank)
        assert lora.scaling == 8 / lora.rank
        np.testing.assert_array_equal(widen(lora.a, dtype), tensors[f"{stem}.lora_A.weight"].float().numpy())
        np.testing.assert_array_equal(widen(lora.b, dtype), tensors[f"{stem}.lora_B.weight"].float().numpy())


def test_arrays_go_to_torch_without_a_copy_or_a_warning(tmp_path: Path) -> None:
    tensors = build.tensors(dtype=torch.bfloat16)
    weights = load(tmp_path / "w", build.config(), build.file(tensors))
    a = torch.from_numpy(weights[0, "self_attn.q_proj"].a).view(torch.bfloat16)
    assert torch.equal(a, tensors[f"{Q0}.lora_A.weight"])


def test_mixed_types_are_widened_exactly(tmp_path: Path) -> None:
    tensors = build.tensors(dtype=torch.bfloat16)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors[name] = tensors[name].half()
    weights = load(tmp_path / "w", build.config(), build.file(tensors))
    assert weights.dtype == "F32"
    for (layer, module), lora in weights.items():
        stem = f"base_model.model.model.layers.{layer}.{module}"
        for half, array in (("A", lora.a), ("B", lora.b)):
            np.testing.assert_array_equal(array, tensors[f"{stem}.lora_{half}.weight"].float().numpy())


def test_unaligned_data_is_copied_into_place(tmp_path: Path) -> None:
    tensors = build.tensors()
    header = tiled({name: tensor.shape for name, tensor in tensors.items()})
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    for padding in range(4):
        header["__metadata__"] = {"pad": "x" * padding}
        weights = load(tmp_path / "w", build.config(), build.raw(header, data))
        assert all(lora.a.flags.aligned and lora.b.flags.aligned for lora in weights.values())
        expected = tensors[f"{Q0}.lora_A.weight"].numpy()
        np.testing.assert_array_equal(weights[0, "self_attn.q_proj"].a, expected)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "w"
    data = build.file()
    weights = load(path, build.config(), data)
    path.write_bytes({"flip": data, "cut": data[:-1], "grow": data + b"x"}[damage])
    if damage == "flip":
        flip(path, -3)
    with pytest.raises(AdapterCorrupt, match="damaged") as caught:
        load_weights(path, weights.spec)
    assert str(tmp_path) not in str(caught.value)
