import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.errors import AdapterInvalid, Problem, ProblemList
from adapter_store.formats.safetensors_file import parse_header
from adapter_store.formats.tensor_names import locate
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore
from adapter_store.validation.validate import (
    CheckedAdapter,
    check_adapter,
    check_files,
    max_adapter_bytes,
    validate_adapter,
)

PREFIX = "base_model.model.model.layers."
MLP = ("gate_proj", "up_proj", "down_proj")
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
        "norm_b": pytest.approx(norm_of_b(build.tensors())), "notices": [],
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
    assert set(with_good_config) == set(found) - {"unsupported_bias"} | {"rank_mismatch", "untargeted_modules"}
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
    f"{Q0}.lora_magnitude_vector": "unsupported_use_dora",
    f"{Q0}.lora_B.bias": "unsupported_lora_bias",
    "base_model.model.model.embed_tokens.lora_embedding_A": "unsupported_embedding",
    "base_model.model.lm_head.lora_A.weight": "unsupported_embedding",
    "base_model.model.lm_head.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.weight": "unsupported_modules_to_save",
    f"{PREFIX}0.input_layernorm.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.trainable_tokens_delta": "unsupported_trainable_token_indices",
    "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    "base_model.model.layers.0.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    "layers.0.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    "model.layers.0.self_attn.q_proj.weight": "unknown_tensor",
    f"{Q0}.lora_A.a.b.weight": "unknown_tensor",
    "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight": "unsupported_vision",
    "base_model.model.visual.blocks.0.attn.qkv.lora_A.weight": "unsupported_vision",
    "layers.0.attention.wq.lora_A.weight": "trainer_names",
    "layers.0.mlp.w1.lora_a.weight": "trainer_names",
    "base_model.model.model.embed_tokens.lora_A.weight": "unsupported_embedding",
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
    tensors = {f"decoder.{name}": t for name, t in build.tensors().items()}
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert set(found) == {"no_modules", "unknown_tensor"}
    assert "change nothing" in found["no_modules"].message
    assert found["unknown_tensor"].message.count("decoder.base_model") == 3
    assert "8 places" in found["unknown_tensor"].message


@given(st.text(max_size=60) | st.text(alphabet="abkselmodyr.wight_AB019", max_size=60).map(PREFIX.__add__))
def test_only_the_exact_form_is_located(base: BaseShapes, name: str) -> None:
    problems = ProblemList()
    place = locate(name, base, problems)
    assert (place is None) == (len(problems) == 1)
    if place is not None:
        assert place.name.text == f"{PREFIX}{place.layer}.{place.module}.lora_{place.half}.weight"
        assert place.name.notices or name == place.name.text


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
    monkeypatch.setattr("adapter_store.validation.tensor_scan.CHUNK_BYTES", 64)
    tensors = build.tensors()
    tensors[f"{Q0}.lora_B.weight"][31, 3] = torch.nan
    assert "non_finite" in problems_of(lambda: check(build.config(), build.file(tensors)))
    tensors[f"{Q0}.lora_B.weight"][31, 3] = 0
    data = build.file(tensors)
    assert check(build.config(), data).spec.weights_digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [1, 2, 3, 4, 200, 1001])
def test_a_file_that_becomes_shorter_while_it_is_read(
    dtype: torch.dtype, missing: int, build: Any, base: BaseShapes, problems_of: ProblemsOf
) -> None:
    """Somebody writes to the folder meanwhile; the end need not be that of a value."""
    data = build.file(dtype=dtype)
    found = problems_of(lambda: check_adapter(build.config(), io.BytesIO(data[:-missing]), len(data), base, 16))
    assert set(found) == {"truncated"}


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
    assert warnings(check(build.config(base_model_name_or_path="acme/Tiny_Llama-hf"), data)) == ""
    assert "another quantization" in warnings(
        check(build.config(base_model_name_or_path="a/Tiny_Llama-bnb-4bit"), data)
    )


def test_the_base_is_known_by_its_file_not_by_what_clients_call_it(build: Any, base: BaseShapes) -> None:
    data = build.file()
    called_chat = replace(base, name="chat", checkpoint="Tiny-Llama.Q4_K_M")
    checked = check_adapter(build.config(), io.BytesIO(data), len(data), called_chat, 16)
    assert warnings(checked) == ""


def norm_of_b(tensors: dict[str, torch.Tensor]) -> float:
    return float(sum(t.double().norm() for name, t in tensors.items() if "lora_B" in name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_of_b_over_many_chunks(
    dtype: torch.dtype, build: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapter_store.validation.tensor_scan.CHUNK_BYTES", 64)
    tensors = build.tensors(dtype=dtype)
    report = check(build.config(), build.file(tensors)).report
    assert report.norm_b == pytest.approx(norm_of_b(tensors), rel=1e-9)
    untrained = {n: t * ("lora_A" in n) for n, t in tensors.items()}
    assert check(build.config(), build.file(untrained)).report.norm_b == 0


def test_a_report_from_before_there_was_a_norm(build: Any, check: Any) -> None:
    report = check(build.config(), build.file()).report
    old = {name: value for name, value in report.to_dict().items() if name not in ("norm_b", "notices")}
    assert type(report).from_dict(old) == replace(report, norm_b=None)


PARTIAL: dict[str, tuple[dict[str, Any], int, str]] = {
    "a module more": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, 2, "model.layers.0.self_attn.o_proj"),
    "in one layer": ({"target_modules": ["q_proj", "v_proj", "1.mlp.up_proj"]}, 1, "model.layers.1.mlp.up_proj"),
    "by its full name": (
        {"target_modules": ["q_proj", "v_proj", "model.layers.1.mlp.up_proj"]}, 1, "model.layers.1.mlp.up_proj",
    ),
    "a full name is in every layer's stead": (
        {"target_modules": ["model.layers.0.mlp.up_proj", "q_proj", "v_proj"], "layers_to_transform": [0, 1]}, 1,
        "model.layers.0.mlp.up_proj",
    ),
    "the head": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, 1, "lm_head"),
    "the head whatever the layers": (
        {"target_modules": ["q_proj", "v_proj", "lm_head"], "layers_to_transform": [0, 1]}, 1, "lm_head",
    ),
    "embeddings": ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, 1, "model.embed_tokens"),
    "all linear ones": ({"target_modules": "all-linear"}, 10, "model.layers.0.self_attn.k_proj"),
    "all linear ones whatever the layers": (
        {"target_modules": "All-Linear", "layers_to_transform": [1]}, 10, "model.layers.0.self_attn.k_proj",
    ),
    "all but some": (
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "o_proj", "gate_proj", "up_proj"]}, 2,
        "model.layers.0.mlp.down_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTIAL)
def test_a_partial_adapter_is_refused_unless_allowed(
    case: str, build: Any, base: BaseShapes, problems_of: ProblemsOf
) -> None:
    changes, missing, first = PARTIAL[case]
    data = build.file()
    config = build.config(**changes)

    def run(**options: bool) -> CheckedAdapter:
        return check_adapter(config, io.BytesIO(data), len(data), base, 16, **options)

    [problem] = problems_of(run).values()
    assert (problem.code, problem.field) == ("partial_adapter", "target_modules")
    assert (
        f"names {4 + missing} modules of this base, and {missing} have no tensors (first: {first})" in problem.message
    )
    assert "--allow-partial" in problem.message
    checked = run(allow_partial=True)
    assert (checked.report.modules_matched, checked.report.modules_expected) == (4, 4 + missing)
    assert f"partial: {missing} of {4 + missing}" in warnings(checked)
    assert first in warnings(checked)
    whole = check_adapter(build.config(), io.BytesIO(data), len(data), base, 16)
    assert checked.spec == whole.spec


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"layers_to_transform": [0]}, 1),
        ({"layers_to_transform": 0}, 1),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, 1),
        ({"layers_to_transform": [0, 7]}, 1),
        ({"layers_to_transform": []}, 2),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]}, 2),
        ({"target_modules": ["q_proj", "v_proj", "fc1", "c_attn"]}, 2),
        ({"target_modules": ["layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]}, 1),
        ({"target_modules": ".*"}, 1),
        ({"target_modules": "all-linear", "exclude_modules": ".*mlp.*"}, 1),
        ({"target_modules": None}, 1),
        ({"target_modules": []}, 1),
        ({"exclude_modules": r".*\.1\..*"}, 1),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, 1),
        ({"layers_to_transform": "0"}, 1),
    ],
)
def test_what_the_config_leaves_out_or_does_not_say_is_not_missed(
    changes: dict[str, Any], layers: int, build: Any, check: Any
) -> None:
    report = check(build.config(**changes), build.file(layers=layers)).report
    assert (report.modules_matched, report.modules_expected) == (2 * layers, 2 * layers)
    assert report.warnings == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj"]},
        {"layers_to_transform": [0]},
        {"exclude_modules": ["0.self_attn.v_proj", "1.self_attn.v_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["v_proj", "k_proj", "o_proj", *MLP]},
    ],
)
def test_tensors_that_peft_would_drop_are_refused(
    changes: dict[str, Any], build: Any, check: Any, problems_of: ProblemsOf
) -> None:
    [problem] = problems_of(lambda: check(build.config(**changes), build.file())).values()
    assert problem.code == "untargeted_modules"
    assert "leaves out 2 modules" in problem.message


def test_a_partial_adapter_stays_accepted(
    build: Any, base: BaseShapes, tmp_path: Any, put: Any, problems_of: ProblemsOf
) -> None:
    """Loading checks the content once more; that modules are missing was settled at the upload."""
    config, data = build.config(target_modules=["q_proj", "v_proj", "o_proj"]), build.file()
    with AdapterStore(tmp_path / "store", base, max_lora_rank=16) as store:
        assert "partial_adapter" in problems_of(lambda: store.register("mia", config, put(store, data)))
        ref = store.register("mia", config, put(store, data), allow_partial=True).ref
        assert ref.key == store.register("whole", build.config(), put(store, data)).ref.key
        store.delete("whole")
    with AdapterStore(tmp_path / "store", base, max_lora_rank=16) as store:
        assert len(store.load(store.resolve("mia").key)) == 4
        assert "partial: 2 of 6" in store.version_history.report(ref).warnings[0]
        assert "partial_adapter" in problems_of(lambda: store.register("poet", config, put(store, data)))


WRAPPED: dict[str, tuple[Callable[[str], str], str]] = {
    "compiled": (lambda n: f"_orig_mod.{n}", "_orig_mod. removed (torch.compile)"),
    "compiled base": (lambda n: n.replace("model.model.model.", "model.model._orig_mod.model."), "_orig_mod. removed"),
    "fsdp": (lambda n: n.replace(".self_attn", "._fsdp_wrapped_module.self_attn"), "_fsdp_wrapped_module. removed"),
    "data parallel": (lambda n: f"module.{n}", "module. removed (DataParallel)"),
    "bare": (lambda n: n.removeprefix("base_model.model."), "no base_model.model., which was put before them"),
    "in memory": (lambda n: n.replace(".weight", ".default.weight"), "the adapter's own name 'default' removed"),
    "vlm": (lambda n: n.replace("model.layers", "model.language_model.layers"), "language_model. removed"),
    "older vlm": (lambda n: n.replace("model.model.", "model.language_model.model."), "language_model. removed"),
    "all": (
        lambda n: "module._orig_mod." + n.removeprefix("base_model.model.").replace(".weight", ".mia.weight"),
        "_orig_mod. removed",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_wrapped_names_are_read_as_plain_ones_and_reported(case: str, build: Any, check: Any) -> None:
    wrap, notice = WRAPPED[case]
    tensors = {wrap(name): tensor for name, tensor in build.tensors().items()}
    config = build.config(alpha_pattern={"0.self_attn.q_proj": 3, "v_proj": 5})
    plain, wrapped = (check(config, build.file(t)) for t in (build.tensors(), tensors))
    found = [replace(m, a_name="", b_name="") for m in wrapped.spec.modules]
    assert found == [replace(m, a_name="", b_name="") for m in plain.spec.modules]
    assert {m.a_name for m in wrapped.spec.modules} | {m.b_name for m in wrapped.spec.modules} == set(tensors)
    assert any(notice in text for text in wrapped.report.notices)
    assert len(wrapped.report.notices) == (4 if case == "all" else 1)
    assert ("multimodal" in warnings(wrapped)) == ("vlm" in case)
    assert plain.report.notices == ()
    assert type(wrapped.report).from_dict(wrapped.report.to_dict()) == wrapped.report


def test_two_names_for_one_place(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    tensors = build.tensors()
    twice = tensors | {f"_orig_mod.{Q0}.lora_A.weight": tensors[f"{Q0}.lora_A.weight"].clone()}
    [problem] = problems_of(lambda: check(build.config(), build.file(twice))).values()
    assert (problem.code, problem.field) == ("duplicate_module", "model.layers.0.self_attn.q_proj")
    assert "_orig_mod" in problem.message


def test_two_adapters_in_one_file(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    tensors = {name.replace(".weight", ".default.weight"): t for name, t in build.tensors().items()}
    other = {
        name.replace(".default.", ".poet."): t.clone() for name, t in tensors.items() if "0.self_attn.q_proj" in name
    }
    mixed = {name: t for name, t in tensors.items() if "0.self_attn.q_proj" not in name} | other
    found = problems_of(lambda: check(build.config(), build.file(mixed)))
    assert "('default', 'poet')" in found["several_adapters"].message
    assert set(problems_of(lambda: check(build.config(), build.file(tensors | other)))) == {
        "several_adapters",
        "duplicate_module",
    }


def test_a_pattern_that_means_the_wrapped_name(build: Any, check: Any, problems_of: ProblemsOf) -> None:
    """Whoever trained inside the wrapper wrote patterns for its names: what fits only one of the two is not guessed."""
    tensors = {
        name.replace("model.model.model.", "model.model._orig_mod.model."): t for name, t in build.tensors().items()
    }
    for pattern in ("^model.layers.0.self_attn.q_proj", "^_orig_mod.model.layers.0.self_attn.q_proj"):
        config = build.config(alpha_pattern={pattern: 3})
        assert set(problems_of(lambda c=config: check(c, build.file(tensors)))) == {"ambiguous_names"}
        check(config, build.file())


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
