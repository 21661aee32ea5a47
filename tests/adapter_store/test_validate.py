import hashlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.errors import AdapterInvalid, Problem, ProblemList
from adapter_store.safetensors_header import parse_header
from adapter_store.spec import BaseShapes
from adapter_store.tensor_names import locate
from adapter_store.validate import CheckedAdapter, check_adapter, check_files, max_adapter_bytes, validate_adapter

PREFIX = "base_model.model.model.layers."
Q0 = f"{PREFIX}0.self_attn.q_proj"
ProblemsOf = Callable[[Callable[[], object]], dict[str, Problem]]


@pytest.fixture
def check(base: BaseShapes) -> Callable[..., CheckedAdapter]:
    def run(config: Any, data: bytes, max_rank: int = 16) -> CheckedAdapter:
        return check_adapter(config, io.BytesIO(data), len(data), base, max_rank)

    return run


def test_a_good_adapter(build: Any, check: Any, base: BaseShapes) -> None:
    data = build.file()
    checked = check(build.config(), data)
    spec, report = checked.spec, checked.report
    assert [(m.layer, m.module, m.rank, m.scaling) for m in spec.modules] == [
        (layer, f"self_attn.{m}_proj", 4, 2.0) for layer in (0, 1) for m in "qv"
    ]
    assert spec.weights_digest == hashlib.sha256(data).hexdigest()
    assert spec.dtype == "F32"
    assert spec.max_rank == 4
    assert report.to_dict() == {
        "modules_matched": 4, "modules_expected": 4, "layers": 2, "rank_min": 4, "rank_max": 4, "scaling_min": 2.0,
        "scaling_max": 2.0, "dtype": "F32", "weights_bytes": spec.weights_bytes, "digest": spec.key, "warnings": [],
    }  # fmt: skip
    assert type(report).from_dict(report.to_dict()) == report
    header = parse_header(data, 1 << 20)
    assert validate_adapter(build.config(), header, base, 16, weights_digest=spec.weights_digest) == spec


def test_key_is_of_the_mathematics_only(build: Any, check: Any) -> None:
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


def test_everything_wrong_at_once_is_listed(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    tensors = build.tensors()
    tensors[f"{PREFIX}2.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 32)
    tensors[f"{PREFIX}0.mlp.up_proj.lora_A.weight"] = torch.ones(4, 32)
    tensors[f"{PREFIX}0.mlp.down_proj.lora_A.weight"] = torch.ones(4, 47)
    tensors[f"{PREFIX}0.mlp.down_proj.lora_B.weight"] = torch.ones(32, 4)
    tensors[f"{PREFIX}1.mlp.up_proj.lora_A.weight"] = torch.ones(3, 32)
    tensors[f"{PREFIX}1.mlp.up_proj.lora_B.weight"] = torch.ones(48, 3)
    tensors["lm_head.weight"] = torch.ones(2, 2)
    tensors[f"{Q0}.lora_A.weight"][1, 1] = torch.nan
    found = problems_of(lambda: check(build.config(bias="all"), build.file(tensors)))
    assert set(found) == {
        "unsupported_bias",
        "unsupported_modules_to_save",
        "layer_out_of_range",
        "missing_half",
        "shape_mismatch",
        "non_finite",
    }
    assert "layer 2 of 2" in found["layer_out_of_range"].message
    assert found["missing_half"].field == "model.layers.0.mlp.up_proj"
    assert "[4, 47]" in found["shape_mismatch"].message
    assert "[rank, 48]" in found["shape_mismatch"].message
    with_good_config = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert set(with_good_config) == set(found) - {"unsupported_bias"} | {"rank_mismatch"}
    assert "tensors have rank 3, the config says 4" in with_good_config["rank_mismatch"].message


def test_rank_over_the_limit_is_refused(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    data = build.file(rank=17)
    found = problems_of(lambda: check(build.config(r=17), data))
    assert "rank 17; this server takes at most 16" in found["rank_too_large"].message
    assert "4 places" in found["rank_too_large"].message
    assert check(build.config(r=17), data, max_rank=17).spec.max_rank == 17


@pytest.mark.parametrize(
    ("change", "hint"), [("transposed", "transposed"), ("swapped", "swapped"), ("3d", "another base")]
)
def test_shape_hints(change: str, hint: str, build: Any, check: Any, problems_of: ProblemsOf) -> None:
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


def test_square_transposed_layers_are_caught_by_their_rank(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    tensors = {n: t.T.contiguous() for n, t in build.tensors(modules=("self_attn.q_proj",)).items()}
    assert "shape_mismatch" in problems_of(lambda: check(build.config(), build.file(tensors)))


FOREIGN = {
    f"{Q0}.lora_A.default.weight": "adapter_name_in_tensor",
    f"{Q0}.lora_magnitude_vector": "unsupported_use_dora",
    f"{Q0}.lora_B.bias": "unsupported_lora_bias",
    "base_model.model.model.embed_tokens.lora_embedding_A": "unsupported_embedding",
    "base_model.model.lm_head.lora_A.weight": "unsupported_embedding",
    "base_model.model.lm_head.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.weight": "unsupported_modules_to_save",
    f"{PREFIX}0.input_layernorm.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.trainable_tokens_delta": "unsupported_trainable_token_indices",
    "base_model.model._orig_mod.model.layers.0.self_attn.q_proj.lora_A.weight": "wrapped_names",
    "base_model.model.model._fsdp_wrapped_module.layers.0.self_attn.q_proj.lora_A.weight": "wrapped_names",
    f"module.{Q0}.lora_A.weight": "wrapped_names",
    "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight": "wrapped_names",
    "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight": "wrapped_names",
    "model.layers.0.self_attn.q_proj.lora_A.weight": "missing_prefix",
    "model.layers.0.self_attn.q_proj.lora_a": "mlx_adapter",
    f"{PREFIX}0.mlp.experts.3.up_proj.lora_A.weight": "unsupported_experts",
    "unet.down_blocks.0.lora_up.weight": "not_a_language_model",
    f"{PREFIX}0.self_attn.qkv_proj.lora_A.weight": "unknown_tensor",
    f"{PREFIX}00.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    f"{PREFIX}-1.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    f"{PREFIX}٣.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    f"{PREFIX}9999999.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    f"{Q0}.lora_A.weight ": "unknown_tensor",
    f"{Q0}\x00.lora_A.weight": "unknown_tensor",
    "../../etc/passwd": "unknown_tensor",
    "": "unknown_tensor",
}


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_tensors_are_refused_with_what_they_are(
    name: str, build: Any, check: Any, problems_of: ProblemsOf
) -> None:
    tensors = build.tensors() | {name: torch.ones(4, 32)}
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert list(found) == [FOREIGN[name]]
    message = found[FOREIGN[name]].message
    assert "Expected base_model.model.model.layers.N.M.lora_A.weight" in message
    assert "self_attn.q_proj" in message
    assert "\x00" not in found[FOREIGN[name]].field


def test_an_adapter_that_matches_nothing_is_an_error_with_examples(
    build: Any, check: Any, problems_of: ProblemsOf
) -> None:
    tensors = {f"_orig_mod.{name}": t for name, t in build.tensors().items()}
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert "change nothing" in found["no_modules"].message
    assert found["wrapped_names"].message.count("_orig_mod.base_model") == 3
    assert "8 places" in found["wrapped_names"].message


@given(st.text(max_size=60) | st.text(alphabet="abkselmodyr.wight_AB019", max_size=60).map(PREFIX.__add__))
def test_only_the_exact_form_is_located(base: BaseShapes, name: str) -> None:
    problems = ProblemList()
    place = locate(name, base, problems)
    assert (place is None) == (len(problems) == 1)
    if place is not None:
        assert name == f"{PREFIX}{place.layer}.{place.module}.lora_{place.half}.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, -1])
def test_non_finite_values(
    dtype: torch.dtype, value: float, where: int, build: Any, check: Any, problems_of: ProblemsOf
) -> None:
    tensors = build.tensors(dtype=dtype)
    name = f"{PREFIX}1.self_attn.v_proj.lora_B.weight"
    tensors[name].view(-1)[where] = value
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert found["non_finite"].field == name
    assert "NaN or infinite" in found["non_finite"].message


def test_the_largest_finite_values_pass_and_what_bf16_cannot_hold_does_not(
    build: Any, check: Any, problems_of: ProblemsOf
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        tensors = build.tensors(dtype=dtype)
        tensors[f"{Q0}.lora_A.weight"][0, 0] = -torch.finfo(dtype).max
        check(build.config(), build.file(tensors))
    tensors = build.tensors()
    largest = torch.finfo(torch.bfloat16).max
    tensors[f"{Q0}.lora_A.weight"][0, 0] = largest
    check(build.config(), build.file(tensors))
    tensors[f"{Q0}.lora_A.weight"][0, 0] = 3.3961775292304601e38  # halfway to the next: rounds to infinity
    assert tensors[f"{Q0}.lora_A.weight"].bfloat16().isinf().any()
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert "too large for bf16" in found["non_finite"].message


def test_nan_beyond_the_first_chunk(
    build: Any, check: Any, problems_of: ProblemsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapter_store.data_scan.CHUNK_BYTES", 64)
    tensors = build.tensors()
    tensors[f"{Q0}.lora_B.weight"][31, 3] = torch.nan
    assert "non_finite" in problems_of(lambda: check(build.config(), build.file(tensors)))
    tensors[f"{Q0}.lora_B.weight"][31, 3] = 0
    data = build.file(tensors)
    assert check(build.config(), data).spec.weights_digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("alpha", [1e308, -1e300, 10**18])
def test_scaling_must_fit_float32(alpha: float, build: Any, check: Any, problems_of: ProblemsOf) -> None:
    if alpha == 10**18:
        assert check(build.config(lora_alpha=alpha), build.file()).spec.modules[0].scaling == 2.5e17
    else:
        found = problems_of(lambda: check(build.config(lora_alpha=alpha), build.file()))
        assert "float32" in found["invalid_alpha"].message


def warnings(checked: CheckedAdapter) -> str:
    return " | ".join(checked.report.warnings)


def test_warnings(build: Any, check: Any) -> None:
    data = build.file()
    untrained = {n: t * ("lora_A" in n) for n, t in build.tensors().items()}
    assert "untrained" in warnings(check(build.config(), build.file(untrained)))
    assert "untrained" in warnings(check(build.config(lora_alpha=0), data))
    untrained[f"{Q0}.lora_B.weight"] = torch.ones(32, 4)
    assert "3 of 4 modules" in warnings(check(build.config(), build.file(untrained)))
    other = check(build.config(base_model_name_or_path="/home/someone/secret/Llama-3-70B/"), data)
    assert "trained on 'Llama-3-70B'" in warnings(other)
    assert "secret" not in warnings(other)
    assert warnings(check(build.config(base_model_name_or_path="acme/Tiny_Llama-bnb-4bit"), data)) == ""
    partial = check(build.config(target_modules=["q_proj", "v_proj", "o_proj"]), data)
    assert "partial: 2 of 6" in warnings(partial)
    assert (partial.report.modules_matched, partial.report.modules_expected) == (4, 6)


def test_partial_layers_and_modules_are_expected_where_the_config_says_so(build: Any, check: Any) -> None:
    data = build.file(layers=1)
    assert check(build.config(layers_to_transform=[0]), data).report.modules_expected == 2
    assert check(build.config(layers_to_transform=0), data).report.modules_expected == 2
    config = build.config(target_modules=["q_proj", "v_proj", "k_proj"], exclude_modules=["k_proj"])
    assert check(config, data).report.modules_expected == 4
    assert check(build.config(target_modules=".*"), data).report.modules_expected == 2
    assert check(build.config(target_modules=".*"), data).report.warnings == ()


def test_mixed_types_are_accepted_with_a_warning(build: Any, check: Any) -> None:
    tensors = build.tensors(dtype=torch.bfloat16)
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].half()
    checked = check(build.config(), build.file(tensors))
    assert checked.spec.dtype == "F32"
    assert "BF16 and F16" in warnings(checked)


def test_check_files_is_the_offline_check(tmp_path: Any, build: Any, base: BaseShapes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(build.file())
    assert check_files(build.config(), path, base, 16).report.modules_matched == 4
    path.write_bytes(build.file()[:-5])
    with pytest.raises(AdapterInvalid, match="cut short"):
        check_files(build.config(), path, base, 16)


def test_problems_are_bounded(build: Any, check: Any) -> None:
    config = build.config(**{f"future_{i}": i + 1 for i in range(500)})
    with pytest.raises(AdapterInvalid) as caught:
        check(config, build.file())
    assert len(caught.value.problems) == 101
    assert "400 more" in caught.value.problems[-1].message


def test_largest_adapter_fits_the_limit(base: BaseShapes, build: Any, check: Any) -> None:
    data = build.file(rank=16, modules=tuple(base.modules))
    check(build.config(r=16, target_modules="all-linear"), data)
    assert len(data) <= max_adapter_bytes(base, 16)
