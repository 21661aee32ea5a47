"""Names of tensors: mapped to the base's modules in their exact form, or refused with what they look like."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_kit import BASE, PREFIX, Q0, build, check, problems_of, warnings

from adapter_store.errors import ProblemList
from adapter_store.formats.tensor_names import locate

FOREIGN = {
    "base_model.model.model.embed_tokens.lora_embedding_A": "unsupported_embedding",
    "base_model.model.lm_head.lora_A.weight": "unsupported_embedding",
    "base_model.model.lm_head.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.weight": "unsupported_modules_to_save",
    "base_model.model.model.embed_tokens.trainable_tokens_delta": "unsupported_trainable_token_indices",
    "base_model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": "wrapped_twice",
    "base_model.model.layers.0.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    "layers.0.self_attn.q_proj.lora_A.weight": "unknown_tensor",
    "model.layers.0.self_attn.q_proj.weight": "unsupported_modules_to_save",
    f"{Q0}.weight": "unsupported_modules_to_save",
    f"{Q0}.modules_to_save.weight": "unsupported_modules_to_save",
    f"{Q0}.modules_to_save.default.weight": "unsupported_modules_to_save",
    f"{Q0}.original_module.weight": "unsupported_modules_to_save",
    f"{Q0}.base_layer.weight": "unsupported_modules_to_save",
    f"{PREFIX}0.mlp.other_proj.weight": "unknown_tensor",
    f"{PREFIX}0.other_norm.weight": "unknown_tensor",
    f"{PREFIX}0.self_attn.q_norm.bias": "unknown_tensor",
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
def test_foreign_tensors_are_refused_with_what_they_are(name: str) -> None:
    tensors = build.tensors() | {name: torch.ones(4, 32)}
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert list(found) == [FOREIGN[name]]
    message = found[FOREIGN[name]].message
    assert "Expected base_model.model.model.layers.N.M.lora_A.weight" in message
    assert "self_attn.q_proj" in message
    assert "\x00" not in found[FOREIGN[name]].field


def test_an_adapter_that_matches_nothing_is_an_error_with_examples() -> None:
    tensors = {f"decoder.{name}": t for name, t in build.tensors().items()}
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert set(found) == {"no_modules", "unknown_tensor"}
    assert "LoRA of no linear module" in found["no_modules"].message
    assert found["unknown_tensor"].message.count("decoder.base_model") == 3
    assert "8 places" in found["unknown_tensor"].message


@given(st.text(max_size=60) | st.text(alphabet="abkselmodyr.wight_AB019", max_size=60).map(PREFIX.__add__))
def test_only_the_exact_form_is_located(name: str) -> None:
    problems = ProblemList()
    place = locate(name, BASE, problems)
    assert (place is None) == (len(problems) == 1)
    if place is not None:
        assert place.part in ("A", "B")
        assert place.name.text == f"{PREFIX}{place.layer}.{place.module}.lora_{place.part}.weight"
        assert place.name.notices or name == place.name.text


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
def test_wrapped_names_are_read_as_plain_ones_and_reported(case: str) -> None:
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


def test_two_names_for_one_place() -> None:
    tensors = build.tensors()
    twice = tensors | {f"_orig_mod.{Q0}.lora_A.weight": tensors[f"{Q0}.lora_A.weight"].clone()}
    [problem] = problems_of(lambda: check(build.config(), build.file(twice))).values()
    assert (problem.code, problem.field) == ("duplicate_module", "model.layers.0.self_attn.q_proj")
    assert "_orig_mod" in problem.message


def test_two_adapters_in_one_file() -> None:
    tensors = {name.replace(".weight", ".default.weight"): t for name, t in build.tensors().items()}
    other = {
        name.replace(".default.", ".poet."): t.clone() for name, t in tensors.items() if "0.self_attn.q_proj" in name
    }
    mixed = {name: t for name, t in tensors.items() if "0.self_attn.q_proj" not in name} | other
    found = problems_of(lambda: check(build.config(), build.file(mixed)))
    assert "('default', 'poet')" in found["several_adapters"].message
    both = problems_of(lambda: check(build.config(), build.file(tensors | other)))
    assert both.keys() == {"several_adapters", "duplicate_module"}


def test_a_pattern_that_means_the_wrapped_name() -> None:
    """Patterns may have been written for wrapped names: one that matches only one of the two is refused."""
    tensors = {
        name.replace("model.model.model.", "model.model._orig_mod.model."): t for name, t in build.tensors().items()
    }
    for pattern in ("^model.layers.0.self_attn.q_proj", "^_orig_mod.model.layers.0.self_attn.q_proj"):
        config = build.config(alpha_pattern={pattern: 3})
        assert set(problems_of(lambda c=config: check(c, build.file(tensors)))) == {"ambiguous_names"}
        check(config, build.file())
