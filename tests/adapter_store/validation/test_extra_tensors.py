"""Tensors beside lora_A and lora_B: what is taken, and what PEFT would leave out and is refused here."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from store_kit import BASE, PREFIX, Q0, Tensors, build, check, problems_of

Q1 = f"{PREFIX}1.self_attn.q_proj"
BIASED = replace(
    BASE,
    biased=frozenset({"self_attn.q_proj", "self_attn.k_proj"}),
    norms={"input_layernorm": 32, "post_attention_layernorm": 32},
    final_norm="model.norm",
)
OUT, KV = BASE.modules["self_attn.q_proj"][1], BASE.modules["self_attn.k_proj"][1]
QS = build.tensors(modules=("self_attn.q_proj",))
MAGNITUDES: Tensors = {f"{q}.lora_magnitude_vector": torch.ones(OUT) for q in (Q0, Q1)}
B_BIASES: Tensors = {f"{q}.lora_B.bias": torch.ones(OUT) for q in (Q0, Q1)}
BIASES: Tensors = {f"{q}.base_layer.bias": torch.ones(OUT) for q in (Q0, Q1)}
K_BIASES: Tensors = {f"{PREFIX}{i}.self_attn.k_proj.bias": torch.ones(KV) for i in (0, 1)}
NORMS: Tensors = {f"{PREFIX}{i}.{n}.weight": torch.ones(32) for i in (0, 1) for n in BIASED.norms}
FINAL: Tensors = {"base_model.model.model.norm.weight": torch.ones(32)}


def checked(tensors: Tensors, **config: Any) -> Any:
    return check(build.config(target_modules=["q_proj"], **config), build.file(QS | tensors), base=BIASED)


def test_what_is_taken_is_reported_and_named() -> None:
    found = checked(MAGNITUDES | BIASES | K_BIASES | NORMS | FINAL, use_dora=True, bias="all", modules_to_save=["norm"])
    assert [m.magnitude for m in found.spec.modules] == list(MAGNITUDES)
    assert [s.parameter for s in found.spec.saved if s.layer == 1] == [
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.q_proj.base_layer.bias",
    ]
    assert found.report.notices == (
        "holds DoRA's magnitudes of 2 modules",
        "holds 4 biases instead of the base's",
        "holds 5 norms instead of the base's",
    )
    assert checked(B_BIASES, lora_bias=True).report.notices == ("holds biases beside lora_B of 2 modules",)
    assert checked({}).report.notices == ()


def test_their_content_makes_another_key() -> None:
    keys = {
        checked({name: n * tensor for name, tensor in MAGNITUDES.items()}, use_dora=True).spec.key for n in (1, 2, 3)
    }
    assert len(keys | {checked({}).spec.key}) == 4


WIDE = {name: torch.ones(len(t) + 1) for name, t in MAGNITUDES.items()}
REFUSED: dict[str, tuple[Tensors, dict[str, Any], str, str]] = {
    "no magnitude": ({}, {"use_dora": True}, "use_dora_mismatch", "has no lora_magnitude_vector"),
    "one magnitude": (
        {f"{Q0}.lora_magnitude_vector": torch.ones(OUT)}, {"use_dora": True}, "use_dora_mismatch", "layers.1."
    ),
    "magnitude unsaid": (MAGNITUDES, {}, "use_dora_mismatch", "set use_dora to true"),
    "magnitude too long": (WIDE, {"use_dora": True}, "shape_mismatch", f"takes [{OUT}]"),
    "magnitude not finite": (
        MAGNITUDES | {f"{Q0}.lora_magnitude_vector": torch.full((OUT,), torch.nan)},
        {"use_dora": True}, "non_finite", "",
    ),
    "magnitude alone": (
        MAGNITUDES | {f"{PREFIX}0.self_attn.v_proj.lora_magnitude_vector": torch.ones(KV)},
        {"use_dora": True}, "missing_half", "has no lora_A and no lora_B",
    ),
    "b bias unsaid": (B_BIASES, {}, "lora_bias_mismatch", "set lora_bias to true"),
    "dora with b bias": (
        MAGNITUDES | B_BIASES, {"use_dora": True, "lora_bias": True}, "unsupported_lora_bias", "in PEFT neither"
    ),
    "bias unsaid": (BIASES, {}, "bias_mismatch", "bias=none"),
    "bias of all, of some": (BIASES, {"bias": "all"}, "partial_adapter", "k_proj.bias"),
    "no bias": ({}, {"bias": "lora_only"}, "partial_adapter", "q_proj.bias"),
    "old name of a bias": (
        {f"{q}.bias": torch.ones(OUT) for q in (Q0, Q1)},
        {"bias": "lora_only"}, "bias_mismatch", "q_proj.base_layer.bias",
    ),
    "bias that the base lacks": (
        BIASES | {f"{PREFIX}0.self_attn.v_proj.bias": torch.ones(KV)},
        {"bias": "lora_only"}, "unsupported_bias", "none in this base",
    ),
    "norm unsaid": (FINAL, {}, "untargeted_modules", "modules_to_save"),
    "norms, some": (FINAL, {"modules_to_save": ["norm"]}, "missing_saved_modules", "input_layernorm"),
    "a linear": ({}, {"modules_to_save": ["k_proj"]}, "unsupported_modules_to_save", "only norms"),
    "what LoRA is on": ({}, {"modules_to_save": ["self_attn"]}, "unsupported_modules_to_save", "only norms"),
    "everything": ({}, {"modules_to_save": ["layers"]}, "unsupported_modules_to_save", "only norms"),
    "an expression": ({}, {"modules_to_save": [".*"]}, "unsupported_modules_to_save", "no name"),
    "two biases": (
        BIASES | {f"{Q0}.bias": torch.ones(OUT)}, {"bias": "lora_only"}, "duplicate_module", "two tensors for its bias"
    ),
    "norm of another width": (
        {"base_model.model.model.norm.weight": torch.ones(33)}, {"modules_to_save": ["model.norm"]},
        "shape_mismatch", "takes [32]",
    ),
    "a dot that is any letter": ({}, {"modules_to_save": ["lm.head"]}, "unsupported_modules_to_save", "names lm_head"),
    "head promised": ({}, {"modules_to_save": ["lm_head"]}, "missing_saved_modules", "lm_head"),
    "a linear's copy": (
        {f"{PREFIX}0.self_attn.v_proj.weight": torch.ones(KV, 32)}, {},
        "unsupported_modules_to_save", "merge",
    ),
    "two spellings": (
        MAGNITUDES | {f"{Q0}.lora_magnitude_vector.weight": torch.ones(OUT)},
        {"use_dora": True}, "duplicate_module", "two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    tensors, config, code, said = REFUSED[case]
    found = problems_of(lambda: checked(tensors, **config))
    assert list(found) == [code]
    assert said in f"{found[code].field} {found[code].message}"


def copies(linear: str, name: str = "weight") -> Tensors:
    n_in, n_out = BASE.modules[linear]
    stems = [f"{PREFIX}{layer}.{linear}" for layer in (0, 1)]
    return {f"{stem}.{name}": torch.ones(n_out, n_in) for stem in stems} | {
        f"{s}.bias": torch.ones(n_out) for s in stems
    }


@pytest.mark.parametrize("name", ["weight", "modules_to_save.weight"])
def test_copies_of_linears_are_refused_as_what_they_are(name: str) -> None:
    """PEFT puts no LoRA on them, and saves their biases too; a linear need not be called so."""
    copy = build.config(target_modules=["q_proj", "k_proj"], modules_to_save=["k_proj"])
    found = problems_of(lambda: check(copy, build.file(QS | copies("self_attn.k_proj", name)), base=BIASED))
    assert list(found) == ["unsupported_modules_to_save"]
    dense = replace(BIASED, modules={"dense" if m.endswith("k_proj") else m: w for m, w in BASE.modules.items()})
    tensors = {key.replace("self_attn.k_proj", "dense"): t for key, t in copies("self_attn.k_proj", name).items()}
    tensors = {key: t for key, t in tensors.items() if not key.endswith("bias")}
    found = problems_of(lambda: check(build.config(), build.file(build.tensors() | tensors), base=dense))
    assert list(found) == ["unsupported_modules_to_save"]
    assert "merge the adapter into the base" in found["unsupported_modules_to_save"].message


def test_an_adapter_of_saved_tensors_alone_is_refused() -> None:
    config = build.config(modules_to_save=["model.norm"])
    found = problems_of(lambda: check(config, build.file(FINAL), base=BIASED))
    assert "no_modules" in found


def test_a_partial_one_may_be_allowed() -> None:
    config = build.config(target_modules=["q_proj"], bias="all")
    found = check(config, build.file(QS | BIASES), base=BIASED, allow_partial=True)
    assert "2 of 4 targeted modules have no tensors" in " ".join(found.report.warnings)
