"""MLX's adapters, converted: the same numbers, and mlx-lm's formula."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from store_kit import BASE, build, problems_of, widen

from adapter_store.errors import AdapterInvalid
from adapter_store.formats import mlx_dir
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.formats.mlx_dir import _alpha
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.formats.weights import AdapterWeights, load_weights
from adapter_store.validation.validate import CheckedAdapter, check_files

MlxWriter = Callable[..., Path]
# What mlx_lm.lora writes: the options of the run.
RUN: dict[str, Any] = {
    "adapter_path": "adapters",
    "batch_size": 4,
    "data": "data/",
    "fine_tune_type": "lora",
    "iters": 100,
    "learning_rate": 1e-5,
    "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "model": "mlx-community/tiny-llama-4bit",
    "num_layers": 1,
    "save_every": 100,
    "train": True,
}


def as_mlx(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    halves = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    renamed = {}
    for name, tensor in tensors.items():
        suffix = name[-len(".lora_A.weight") :]
        stem = name.removeprefix("base_model.model.").removesuffix(suffix)
        renamed[stem + halves[suffix]] = tensor.T.contiguous()
    return renamed


@pytest.fixture
def write_mlx(tmp_path: Path) -> MlxWriter:
    def write(tensors: dict[str, torch.Tensor], folder: str = "mlx", **changes: Any) -> Path:
        path = tmp_path / folder
        path.mkdir(parents=True)
        save_file(tensors, path / "adapters.safetensors", metadata={"format": "mlx"})
        (path / "adapter_config.json").write_text(json.dumps(RUN | changes))
        return path

    return write


def opened(folder: Path) -> tuple[CheckedAdapter, AdapterWeights, tuple[str, ...]]:
    with open_adapter_dir(folder) as found:
        checked = check_files(found.config, found.weights_path, BASE, 16)
        weights = load_weights(found.weights_path, checked.spec)
        path = found.weights_path
    assert not path.exists()
    return checked, weights, found.notices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [20.0, 0.1, 3.7])
def test_matrices_and_scaling_are_the_originals(dtype: torch.dtype, scale: float, write_mlx: MlxWriter) -> None:
    tensors = build.tensors(modules=tuple(BASE.modules), dtype=dtype)
    folder = write_mlx(as_mlx(tensors), lora_parameters={"rank": 4, "scale": scale})
    checked, weights, notices = opened(folder)
    assert notices == (f"converted from MLX: 28 tensors transposed, r=4, scaling {scale:g}",)
    assert len(weights) == 14
    assert not checked.report.notices
    for (layer, module), lora in weights.items():
        stem = f"base_model.model.model.layers.{layer}.{module}"
        a, b = widen(lora.a, weights.dtype), widen(lora.b, weights.dtype)
        assert np.array_equal(a, tensors[f"{stem}.lora_A.weight"].float().numpy())
        assert np.array_equal(b, tensors[f"{stem}.lora_B.weight"].float().numpy())
        assert lora.scaling == scale


def test_it_is_mlx_lms_formula(write_mlx: MlxWriter) -> None:
    mlx = as_mlx(build.tensors())
    _, weights, _ = opened(write_mlx(mlx))
    x = np.random.default_rng(0).standard_normal((3, 32))
    for (layer, module), lora in weights.items():
        a, b = (mlx[f"model.layers.{layer}.{module}.lora_{half}"].double().numpy() for half in "ab")
        theirs = 20.0 * ((x @ a) @ b)
        ours = x @ (lora.scaling * lora.b.astype(float) @ lora.a.astype(float)).T
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
        assert np.abs(theirs).max() > 1


def test_last_layers_only_is_whole_and_a_hole_is_partial(write_mlx: MlxWriter) -> None:
    """num_layers counts from the end; which they are, the names say."""
    last = {n: t for n, t in as_mlx(build.tensors()).items() if ".layers.1." in n}
    checked, _, _ = opened(write_mlx(last))
    assert (checked.report.layers, checked.report.modules_expected) == (1, 2)
    hole = {n: t for n, t in as_mlx(build.tensors()).items() if "1.self_attn.v_proj" not in n}
    with pytest.raises(AdapterInvalid, match=r"first: model.layers.1.self_attn.v_proj"):
        opened(write_mlx(hole, "hole"))


@pytest.mark.parametrize(
    ("changes", "layers", "expected", "first"),
    [
        ({"keys": ["self_attn.q_proj", "self_attn.v_proj"]}, (1,), 2, ""),
        ({"keys": ["self_attn.q_proj", "mlp.up_proj"]}, (1,), 3, "model.layers.1.mlp.up_proj"),
        ({"keys": ["self_attn.q_proj", "self_attn.v_proj", "lm_head"]}, (1,), 3, "lm_head"),
        ({"keys": None, "num_layers": -1}, (0, 1), 4, ""),
        ({"num_layers": -1}, (1,), 4, "model.layers.0.self_attn.q_proj"),
        ({"num_layers": 2}, (1,), 4, "model.layers.0.self_attn.q_proj"),
        ({"num_layers": 16}, (0, 1), 4, ""),
        ({"num_layers": 10**12}, (0, 1), 4, ""),
        ({"num_layers": 10**12, "keys": ["mlp.up_proj"]}, (1,), 6, "model.layers.0.self_attn.q_proj"),
        ({"num_layers": "all"}, (1,), 2, ""),
    ],
)
def test_what_the_run_trained_and_the_file_lacks_is_partial(
    changes: dict[str, Any], layers: tuple[int, ...], expected: int, first: str, write_mlx: MlxWriter
) -> None:
    run = {"lora_parameters": RUN["lora_parameters"] | {n: v for n, v in changes.items() if n == "keys"}}
    run |= {n: v for n, v in changes.items() if n != "keys"}
    tensors = {n: t for n, t in as_mlx(build.tensors()).items() if int(n.split(".")[2]) in layers}
    folder = write_mlx(tensors, **run)
    if first:
        with pytest.raises(AdapterInvalid, match=f"first: {first}"):
            opened(folder)
    with open_adapter_dir(folder) as found:
        report = check_files(found.config, found.weights_path, BASE, 16, allow_partial=True).report
    assert (report.modules_matched, report.modules_expected) == (2 * len(layers), expected)


def test_it_is_found_one_level_down_beside_its_checkpoints(write_mlx: MlxWriter) -> None:
    folder = write_mlx(as_mlx(build.tensors()), "run/adapters")
    (folder / "0000100_adapters.safetensors").write_bytes(b"x")
    with open_adapter_dir(folder.parent) as found:
        assert (found.subdirectory, found.ignored_files) == ("adapters", ("0000100_adapters.safetensors",))
        assert found.config["base_model_name_or_path"] == RUN["model"]
        assert check_files(found.config, found.weights_path, BASE, 16).report.modules_matched == 4


def test_the_language_part_of_a_vlm(write_mlx: MlxWriter) -> None:
    tensors = {f"language_model.{n}": t for n, t in as_mlx(build.tensors()).items()}
    checked, _, _ = opened(write_mlx(tensors))
    assert "language_model." in checked.report.notices[0]
    assert "multimodal" in " ".join(checked.report.warnings)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"fine_tune_type": "dora"}, "unsupported_use_dora", "'lora'"),
        ({"use_dora": True}, "unsupported_use_dora", "'lora'"),
        ({"fine_tune_type": "full"}, "mlx_adapter", "mlx_lm.fuse"),
        ({"lora_parameters": None}, "mlx_adapter", "rank and scale"),
        ({"lora_parameters": {"rank": 4}}, "invalid_alpha", "scale"),
        ({"lora_parameters": {"rank": 4, "scale": "20"}}, "invalid_alpha", "'20'"),
        ({"lora_parameters": {"rank": 4, "scale": 1e300}}, "invalid_alpha", "1e+300"),
        ({"lora_parameters": {"rank": True, "scale": 20}}, "invalid_rank", "True"),
        ({"lora_parameters": {"rank": 4, "alpha": 16, "scale": 10.0}}, "invalid_alpha", "early mlx-lm"),
        ({"lora_parameters": {"rank": 8, "scale": 20.0}}, "rank_mismatch", "config says 8"),
        ({"lora_parameters": {"rank": 4, "scale": 20.0, "keys": "q_proj"}}, "mlx_adapter", "list of names"),
        ({"lora_parameters": {"rank": 4, "scale": 20.0, "keys": [1]}}, "mlx_adapter", "list of names"),
    ],
)
def test_what_is_not_converted(changes: dict[str, Any], code: str, words: str, write_mlx: MlxWriter) -> None:
    found = problems_of(lambda: opened(write_mlx(as_mlx(build.tensors()), **changes)))
    assert words in f"{found[code].field}: {found[code].message}"


@pytest.mark.parametrize(
    ("name", "shape", "code"),
    [
        ("model.embed_tokens.lora_a", (64, 4), "unsupported_embedding"),
        ("lm_head.lora_a", (32, 4), "unsupported_embedding"),
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", (8, 32, 4), "mlx_adapter"),
        ("model.layers.0.self_attn.q_proj.m", (32,), "mlx_adapter"),
        ("model.norm.weight", (32,), "mlx_adapter"),
        ("model.layers.٣.self_attn.q_proj.lora_a", (32, 4), "unknown_tensor"),
        (f"model.layers.{'9' * 5000}.self_attn.q_proj.lora_a", (32, 4), "unknown_tensor"),
    ],
)
def test_tensors_that_have_no_place(name: str, shape: tuple[int, ...], code: str, write_mlx: MlxWriter) -> None:
    folder = write_mlx(as_mlx(build.tensors()) | {name: torch.ones(shape)})
    assert next(iter(problems_of(lambda: opened(folder)))) == code


def test_a_hostile_header_is_refused_before_anything_is_written(write_mlx: MlxWriter) -> None:
    folder = write_mlx(as_mlx(build.tensors()))
    (folder / "adapters.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(AdapterInvalid, match="header of 9223372036854775808 bytes"):
        opened(folder)
    (folder / "adapters.safetensors").unlink()
    with pytest.raises(AdapterInvalid, match="is missing beside MLX's"):
        opened(folder)


def test_readers_without_conversion_name_the_commands_that_convert(write_mlx: MlxWriter) -> None:
    with pytest.raises(AdapterInvalid, match=r"is MLX's; `lorasrv upload` and `lorasrv check` convert"):
        read_peft_dir(write_mlx(as_mlx(build.tensors())))


@given(rank=st.integers(1, 256), scale=st.floats(1e-6, 1e6))
def test_alpha_gives_the_scale_back(rank: int, scale: float) -> None:
    """To the last bit wherever an alpha does; one unit off where none does. Served scales are fp32."""
    found = _alpha(rank, scale) / rank
    assert abs(found - scale) <= math.ulp(scale)


@pytest.mark.parametrize("missing", [1, 4, 700])
def test_a_file_that_becomes_shorter_while_it_is_converted(
    missing: int, write_mlx: MlxWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mlx(as_mlx(build.tensors()))
    weights = folder / "adapters.safetensors"
    read = mlx_dir.read_header

    def read_and_shrink(*given: Any) -> Any:
        header = read(*given)
        os.truncate(weights, weights.stat().st_size - missing)
        return header

    monkeypatch.setattr(mlx_dir, "read_header", read_and_shrink)
    with pytest.raises(AdapterInvalid, match="ended while it was read"), open_adapter_dir(folder):
        pass
