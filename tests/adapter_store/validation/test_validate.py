"""Validating an adapter against its base: everything that is wrong, in one report."""

from typing import Any

import pytest
import torch
from store_kit import BASE, PREFIX, Q0, build, check, digest_of, norm_of_b, problems_of

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.safetensors_file import parse_header
from adapter_store.validation.validate import check_files, max_adapter_bytes, validate_adapter


def test_a_good_adapter() -> None:
    data = build.file()
    checked = check(build.config(), data)
    spec, report = checked.spec, checked.report
    assert [(m.layer, m.module, m.rank, m.scaling) for m in spec.modules] == [
        (layer, f"self_attn.{m}_proj", 4, 2.0) for layer in (0, 1) for m in "qv"
    ]
    assert spec.weights_digest == digest_of(data)
    assert spec.dtype == "F32"
    assert spec.max_rank == 4
    assert report.to_dict() == {
        "modules_matched": 4, "modules_expected": 4, "layers": 2, "rank_min": 4, "rank_max": 4, "scaling_min": 2.0,
        "scaling_max": 2.0, "dtype": "F32", "weights_bytes": spec.weights_bytes, "digest": spec.key, "warnings": [],
        "norm_b": pytest.approx(norm_of_b(build.tensors())), "notices": [],
        "stored": "bf16", "drift": None
    }  # fmt: skip
    assert type(report).from_dict(report.to_dict()) == report
    header = parse_header(data, 1 << 20)
    assert validate_adapter(build.config(), header, BASE, 16, weights_digest=spec.weights_digest) == spec


def test_key_is_of_the_mathematics_only() -> None:
    data = build.file()
    key = check(build.config(), data).spec.key
    same = [
        build.config(target_modules=["q_proj", "v_proj"], lora_dropout=0.3, base_model_name_or_path="tiny-llama-x"),
        build.config(alpha_pattern={"q_proj": 8}, rank_pattern={"v_proj": 4}),
        build.config(r=9, rank_pattern={"self_attn.q_proj": 4, "v_proj": 4}),
        build.config(lora_alpha=4, use_rslora=True),
        dict(reversed(build.config().items())),
    ]
    assert {check(config, data).spec.key for config in same} == {key}
    other = [build.config(lora_alpha=9), build.config(use_rslora=True), build.config(alpha_pattern={"q_proj": 9})]
    keys = {check(config, data).spec.key for config in other} | {check(build.config(), build.file(seed=1)).spec.key}
    assert len(keys) == 4
    assert key not in keys


def test_everything_wrong_at_once_is_listed() -> None:
    tensors = build.tensors()
    tensors[f"{PREFIX}2.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 32)
    tensors[f"{PREFIX}0.mlp.up_proj.lora_A.weight"] = torch.ones(4, 32)
    tensors[f"{PREFIX}0.mlp.down_proj.lora_A.weight"] = torch.ones(4, 47)
    tensors[f"{PREFIX}0.mlp.down_proj.lora_B.weight"] = torch.ones(32, 4)
    tensors[f"{PREFIX}1.mlp.up_proj.lora_A.weight"] = torch.ones(3, 32)
    tensors[f"{PREFIX}1.mlp.up_proj.lora_B.weight"] = torch.ones(48, 3)
    tensors["lm_head.weight"] = torch.ones(2, 2)
    tensors[f"{Q0}.lora_A.weight"][1, 1] = torch.nan
    found = problems_of(lambda: check(build.config(bias="some"), build.file(tensors)))
    tensor_codes = {"unsupported_modules_to_save", "layer_out_of_range", "missing_half", "shape_mismatch", "non_finite"}
    assert set(found) == {"unsupported_bias", *tensor_codes}
    assert "layer 2 of 2" in found["layer_out_of_range"].message
    assert found["missing_half"].field == "model.layers.0.mlp.up_proj"
    assert "[4, 47]" in found["shape_mismatch"].message
    assert "[rank, 48]" in found["shape_mismatch"].message
    with_good_config = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert set(with_good_config) == set(found) - {"unsupported_bias"} | {"rank_mismatch", "untargeted_modules"}
    assert "tensors have rank 3, the config says 4" in with_good_config["rank_mismatch"].message


@pytest.mark.parametrize("form", ["int4", "INT8", ""])
def test_a_form_that_there_is_not(form: str) -> None:
    with pytest.raises(AdapterInvalid, match=r"stored: = .*; it must be bf16 or int8"):
        check(build.config(), build.file(), stored=form)


def test_rank_over_the_limit_is_refused() -> None:
    data = build.file(rank=17)
    found = problems_of(lambda: check(build.config(r=17), data))
    assert "rank 17; this server takes at most 16 (serve --max-lora-rank 17)" in found["rank_too_large"].message
    assert "4 places" in found["rank_too_large"].message
    assert check(build.config(r=17), data, max_rank=17).spec.max_rank == 17
    beyond = problems_of(lambda: check(build.config(r=257), build.file(rank=257)))["rank_too_large"].message
    assert "takes at most 16 (no server takes more than 256: train a lower rank)" in beyond


@pytest.mark.parametrize(
    ("change", "hint"), [("transposed", "transposed"), ("swapped", "swapped"), ("3d", "another base")]
)
def test_shape_hints(change: str, hint: str) -> None:
    tensors = build.tensors(modules=("mlp.up_proj",))
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        other = name.replace("lora_A", "@").replace("lora_B", "lora_A").replace("@", "lora_B")
        changed |= {
            "transposed": {name: tensor.T.contiguous()},
            "swapped": {other: tensor},
            "3d": {name: tensor[None]},
        }[change]
    assert hint in problems_of(lambda: check(build.config(), build.file(changed)))["shape_mismatch"].message


def test_square_transposed_layers_are_caught_by_their_rank() -> None:
    tensors = {n: t.T.contiguous() for n, t in build.tensors(modules=("self_attn.q_proj",)).items()}
    assert "shape_mismatch" in problems_of(lambda: check(build.config(), build.file(tensors)))


@pytest.mark.parametrize("alpha", [1e308, -1e300, 10**18])
def test_scaling_must_fit_float32(alpha: float) -> None:
    if alpha == 10**18:
        assert check(build.config(lora_alpha=alpha), build.file()).spec.modules[0].scaling == 2.5e17
    else:
        found = problems_of(lambda: check(build.config(lora_alpha=alpha), build.file()))
        assert "float32" in found["invalid_alpha"].message


def test_check_files_is_the_offline_check(tmp_path: Any) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(build.file())
    assert check_files(build.config(), path, BASE, 16).report.modules_matched == 4
    path.write_bytes(build.file()[:-5])
    with pytest.raises(AdapterInvalid, match="cut short"):
        check_files(build.config(), path, BASE, 16)


def test_problems_are_bounded() -> None:
    config = build.config(**{f"future_{i}": i + 1 for i in range(500)})
    with pytest.raises(AdapterInvalid) as caught:
        check(config, build.file())
    assert len(caught.value.problems) == 101
    assert "400 more" in caught.value.problems[-1].message


def test_largest_adapter_fits_the_limit() -> None:
    data = build.file(rank=16, modules=tuple(BASE.modules))
    check(build.config(r=16, target_modules="all-linear"), data)
    assert len(data) <= max_adapter_bytes(BASE, 16)
