"""PEFT's config: what each field means, which are refused and how, and expressions matched in linear time."""

import io
import itertools
import json
import math
import re
import warnings
from collections import Counter
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_page import PAGE, PARTS, up_to_date
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from store_kit import BASE, build, problems_of
from transformers import LlamaConfig, LlamaForCausalLM

from adapter_store.errors import AdapterInvalid, ProblemList
from adapter_store.formats.adapter_config import (
    FIELD_RULES,
    MAX_CONFIG_BYTES,
    AdapterConfig,
    Decision,
    parse_config,
    read_adapter_config,
)
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.formats.weights import load_weights
from adapter_store.spec import BaseShapes
from adapter_store.validation.validate import CheckedAdapter, check_adapter, check_files, max_names
from api.config.option_spec import flag
from api.config.settings import ServerSettings


def refusals(config: Any) -> dict[str, str]:
    problems = ProblemList()
    assert read_adapter_config(config, problems) is None
    return {p.field: p.message for p in problems.problems()}


def accepted(config: Any) -> AdapterConfig:
    problems = ProblemList()
    adapter_config = read_adapter_config(config, problems)
    assert adapter_config is not None, problems.problems()
    return adapter_config


def test_scaling_of_rslora_and_patterns() -> None:
    adapter_config = accepted(
        build.config(
            use_rslora=True,
            rank_pattern={"layers.1.self_attn.q_proj": 2, "q_proj": 9},
            alpha_pattern={"^model.layers.0.self_attn.q_proj": 3.5},
        )
    )
    assert adapter_config.rank("model.layers.1.self_attn.q_proj") == 2
    assert adapter_config.rank("model.layers.11.self_attn.q_proj") == 9
    assert adapter_config.scaling("model.layers.0.self_attn.q_proj") == 3.5 / math.sqrt(9)
    assert adapter_config.scaling("model.layers.0.self_attn.v_proj") == 8 / math.sqrt(4)


REFUSED_VALUES: dict[str, Any] = {
    "target_parameters": ["experts.w"],
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 1},
    "kasa_config": {"beta": 1},
}


def test_every_refused_field_has_a_case() -> None:
    assert REFUSED_VALUES.keys() == {k for k, rule in FIELD_RULES.items() if rule.decision is Decision.REFUSED}


@pytest.mark.parametrize("field", sorted(REFUSED_VALUES))
def test_refused_fields_say_what_was_found_and_the_way_out(field: str) -> None:
    found = refusals(build.config(**{field: REFUSED_VALUES[field]}))
    assert list(found) == [field]
    assert str(REFUSED_VALUES[field])[:10] in found[field]
    assert FIELD_RULES[field].remedy[1:] in found[field]
    accepted(build.config(**{field: None}))
    assert list(refusals(build.config(**{field: {}}))) == [field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("peft_type", None), ("peft_type", 7),
        ("task_type", "SEQ_CLS"), ("task_type", 1),
        ("r", 0), ("r", -5), ("r", True), ("r", 8.5), ("r", "8"), ("r", None), ("r", [8]),
        ("lora_alpha", math.nan), ("lora_alpha", math.inf), ("lora_alpha", "16"), ("lora_alpha", True),
        ("lora_alpha", None),
        ("use_rslora", "false"), ("use_rslora", 1),
        ("bias", "some"), ("bias", ["all"]), ("use_dora", "yes"), ("lora_bias", 1), ("modules_to_save", "norm"),
        ("modules_to_save", [1]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"), ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "next_year"), ("init_lora_weights", 3),
        ("rank_pattern", [1]), ("alpha_pattern", "x"), ("peft_version", 2**70),
        ("target_modules", {"q_proj": 1}), ("target_modules", [1]), ("target_modules", 5),
        ("exclude_modules", {"q_proj": 1}), ("exclude_modules", 5),
        ("layers_to_transform", "1"), ("layers_to_transform", [1.5]), ("layers_to_transform", {"1": 1}),
        ("layers_to_transform", True),
        ("future_strength", 7), ("future_config", {})
    ]
)  # fmt: skip
def test_bad_values_name_the_field(field: str, value: Any) -> None:
    found = refusals(build.config(**{field: value}))
    assert list(found) == [field]
    assert repr(value)[:20] in found[field] or "missing" in found[field]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "lora"), ("task_type", None), ("lora_alpha", 0.5), ("use_rslora", None),
        ("init_lora_weights", False),
        ("init_lora_weights", "gaussian"), ("init_lora_weights", "eva"), ("init_lora_weights", "orthogonal"),
        ("rank_pattern", None), ("target_modules", "all-linear"), ("target_modules", r"(.*a){20}x"),
        ("target_modules", None),
        ("layers_to_transform", [0]), ("exclude_modules", ["k_proj"]), ("eva_config", {"rho": 2.0}),
        ("future_key", None),
        ("future_key", []), ("future_key", False), ("base_model_name_or_path", None)
    ]
)  # fmt: skip
def test_harmless_values(field: str, value: Any) -> None:
    accepted(build.config(**{field: value}))


def test_uploaded_expressions_are_matched_in_linear_time() -> None:
    """One that backtracks would take years."""
    config = accepted(
        build.config(rank_pattern={r"(.*a){20}x": 4, "q_proj|v_proj": 3}, alpha_pattern={r"layers\.[01]\.": 1})
    )
    assert [config.rank(f"model.layers.0.self_attn.{m}_proj" + "a" * 200 * (m == "k")) for m in "qkv"] == [3, 4, 3]


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_expressions_that_are_not_matched_are_refused(pattern: str) -> None:
    for key, why in (("(?=q)", "not matched here"), ("q_proj(", "missing"), (r"(\w{1,900}x){3}", "")):
        found = refusals(build.config(**{pattern: {key: 4}}))
        assert list(found) == [f"{pattern}[{key!r}]"]
        assert why in found[f"{pattern}[{key!r}]"]
    many = {f"(q|{'abcdefgh' * 20}{i}){{1,9}}": 4 for i in range(20)}
    [message] = refusals(build.config(**{pattern: many})).values()
    assert "is too much, with those before it" in message


def test_expressions_of_both_fields_are_bounded_together() -> None:
    half = {f"(q|{'abcdefgh' * 20}{i}){{1,9}}": 4 for i in range(2)}
    accepted(build.config(rank_pattern=half))
    accepted(build.config(alpha_pattern=half))
    found = refusals(build.config(rank_pattern=half, alpha_pattern=half))
    assert [field.partition("[")[0] for field in found] == ["alpha_pattern"]
    assert "is too much, with those before it" in found.popitem()[1]


@pytest.mark.parametrize(("pattern", "value"), [("rank_pattern", 0), ("rank_pattern", True), ("alpha_pattern", "1")])
def test_pattern_values_are_checked(pattern: str, value: Any) -> None:
    assert list(refusals(build.config(**{pattern: {"q_proj": value}}))) == [f"{pattern}['q_proj']"]


def test_every_problem_is_listed() -> None:
    wrong = {"use_dora": 1, "bias": "x", "lora_alpha": "x", "modules_to_save": "a", "kasa_config": {"beta": 1}}
    found = refusals(build.config(r=0, **wrong))
    assert set(found) == {"r", *wrong}


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
def test_more_names_than_a_base_has_modules(field: str) -> None:
    """Each is held against each module: a config may have a MiB of them, which takes seconds."""

    def config(count: int) -> Any:
        names = [f"other.{number}" for number in range(count)]
        trained = ["q_proj", "v_proj"] if field == "target_modules" else []
        return build.config(**{field: names + trained if "modules" in field else dict.fromkeys(names, 4)})

    assert max_names(BASE) == 1024
    accepted(config(1000))
    found = refusals(config(1 << 15))
    assert list(found) == [field]
    assert f"has {len(config(1 << 15)[field])} entries; 1024 are the most" in found[field]
    large = replace(BASE, num_layers=100)
    assert max_names(large) == 2 * 100 * len(BASE.modules) == 1400
    data = build.file()

    def check(shapes: BaseShapes, count: int) -> None:
        check_adapter(config(count), io.BytesIO(data), len(data), shapes, 16, allow_partial=True)

    for shapes, accepted_count, refused_count in ((BASE, 1000, 1300), (large, 1300, 1500)):
        check(shapes, accepted_count)
        assert f"too_long_{field}" in problems_of(partial(check, shapes, refused_count))


def test_hostile_objects() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert "deeper" in " ".join(refusals(build.config(peft_version=deep)).values())
    assert "not a JSON value" in " ".join(refusals(build.config(revision=b"x")).values())
    assert "must be a string" in " ".join(refusals(build.config(auto_mapping={1: 2})).values())
    assert "bytes" in " ".join(refusals(build.config(revision="x" * MAX_CONFIG_BYTES)).values())
    for message in refusals(build.config(**{"\ud800\u202e" * 200: 1})).values():
        message.encode()


def test_parse_config_reads_json_strictly() -> None:
    assert parse_config(b'{"r": 4}') == {"r": 4}
    bad = [
        b"",
        b"[]",
        b'{"r":1,"r":2}',
        b'{"a":{"b":1,"b":1}}',
        b'{"r":NaN}',
        b'{"r":-Infinity}',
        b"\xff",
        b"[" * 200_000,
        b'{"r":' + b"1" * 5000 + b"}",
        b" " * (MAX_CONFIG_BYTES + 1),
    ]
    for data in bad:
        with pytest.raises(AdapterInvalid) as caught:
            parse_config(data)
        assert caught.value.problems[0].field == "adapter_config.json"


def test_overflowing_number_is_no_number() -> None:
    assert "inf" in refusals(parse_config(json.dumps(build.config()).replace('"r": 4', '"r": 1e999').encode()))["r"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELD_RULES)) | st.text(max_size=8), JSON, max_size=8))
def test_any_object_is_a_manifest_or_a_list_of_problems(changes: dict[str, Any]) -> None:
    problems = ProblemList()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | changes
    adapter_config = read_adapter_config(config, problems)
    assert (adapter_config is None) == (len(problems) > 0)
    for problem in problems.problems():
        problem.message.encode()
        problem.field.encode()
    if adapter_config is not None:
        assert adapter_config.rank("model.layers.0.self_attn.q_proj") >= 1
        json.dumps(config, allow_nan=False)  # what is accepted is what the index can store


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2
    )  # fmt: skip
    return LlamaForCausalLM(config)


def save(folder: Path, adapter_name: str = "default", **options: Any) -> Any:
    """Save a PEFT model with random A and B, and return it."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": ["q_proj"]} | options)
        model = get_peft_model(tiny_llama(), config, adapter_name=adapter_name)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    return model


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "lora_alpha": 8, "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6, "^model.layers.0.self_attn.o_proj": 5, "_proj": 9},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 5, r"mlp\.down_proj": 1},
    },
    "rslora patterns": {
        "lora_alpha": 8, "use_rslora": True, "target_modules": ALL, "rank_pattern": {"self_attn.k_proj": 2},
        "alpha_pattern": {"self_attn.k_proj": 5, "mlp.gate.proj": 11},
    },
    "one layer": {"lora_alpha": 8, "layers_to_transform": [1]},
    "regex targets": {"lora_alpha": 8, "target_modules": r".*layers\.0\..*(up|down)_proj"},
    "gradients of compressed inputs": {"velora_config": {"num_groups": 2}},
    "sampled weights": {"monteclora_config": {"num_samples": 2}},
    **{init: {"init_lora_weights": init} for init in ("gaussian", "orthogonal", "mica")},
}  # fmt: skip


def checked(folder: Path) -> tuple[CheckedAdapter, Path]:
    found = read_peft_dir(folder)
    return check_files(found.config, found.weights_path, BASE, 16), found.weights_path


def lora_layers(model: Any) -> dict[str, LoraLayer]:
    layers = model.base_model.model.named_modules()
    return {name: module for name, module in layers if isinstance(module, LoraLayer)}


@pytest.mark.parametrize("case", CASES)
def test_ranks_scalings_and_deltas_are_pefts(case: str, tmp_path: Path) -> None:
    model = save(tmp_path, **CASES[case])
    result, path = checked(tmp_path)
    theirs = lora_layers(model)
    assert {f"model.layers.{m.layer}.{m.module}" for m in result.spec.modules} == set(theirs)
    for (layer, module), lora in load_weights(path, result.spec).items():
        expected = theirs[f"model.layers.{layer}.{module}"]
        assert lora.rank == expected.r["default"]
        assert lora.scaling == expected.scaling["default"]
        delta = lora.scaling * torch.from_numpy(lora.b) @ torch.from_numpy(lora.a)
        torch.testing.assert_close(delta, expected.get_delta_weight("default"), rtol=1e-5, atol=1e-5)
        assert delta.abs().max() > 0
    assert result.report.modules_matched == len(theirs)
    assert not result.report.warnings
    assert result.report.modules_expected == len(theirs)
    assert case != "patterns" or len({(m.rank, m.scaling) for m in result.spec.modules}) > 3


def test_every_field_of_pefts_config_has_a_decision() -> None:
    """A field that came with another PEFT: decide what it means before anything is served with it."""
    assert {field.name for field in fields(LoraConfig)} - FIELD_RULES.keys() == set()


def test_the_patterns_first_match_is_pefts(tmp_path: Path) -> None:
    """PEFT saves patterns sorted, and what it loads is that order: so do we."""
    save(tmp_path, alpha_pattern={"q_proj": 3, "0.self_attn.q_proj": 5})
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    result, _ = checked(tmp_path)
    for m in result.spec.modules:
        key = get_pattern_key(config["alpha_pattern"].keys(), f"model.layers.{m.layer}.{m.module}")
        assert m.scaling == config["alpha_pattern"][key] / 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "unsupported_modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "unsupported_init"),
    "olora": ({"init_lora_weights": "olora"}, "unsupported_init"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "unsupported_trainable_token_indices"),
    "layer_replication": ({"layer_replication": [[0, 2], [0, 2]]}, "unsupported_layer_replication"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "unsupported_embedding"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "unsupported_embedding"),
    "rank regex": ({"rank_pattern": {r"(?!x)q_proj": 2}}, "unsupported_rank_pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_saves_and_we_refuse(case: str, tmp_path: Path) -> None:
    options, code = REFUSED[case]
    save(tmp_path, **{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)
    assert code in problems_of(lambda: checked(tmp_path))


def test_inits_that_peft_converts_to_plain_lora_name_its_call() -> None:
    for init in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"):
        [told] = refusals(build.config(init_lora_weights=init)).values()
        assert ("path_initial_model_for_weight_conversion" in told) == (init != "loftq")


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"init_lora_weights": "mica"}, {"monteclora_config": {}}])
def test_two_variants_are_refused_as_by_peft(variant: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, target_modules=["q_proj", "v_proj"], velora_config={"num_groups": 2})
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | variant))
    with pytest.raises(ValueError, match="unsupported variant combination"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert any("does not go with" in problem.message for problem in problems_of(lambda: checked(tmp_path)).values())


def test_a_named_adapter_is_saved_one_level_down(tmp_path: Path) -> None:
    save(tmp_path, "pirate")
    assert read_peft_dir(tmp_path).subdirectory == "pirate"
    assert checked(tmp_path)[0].report.modules_matched == 2


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_state_dict_as_in_memory_is_read_as_the_saved_one(wrapped: bool, tmp_path: Path) -> None:
    """Names by torch itself: PEFT's model, compiled and given to data parallelism."""
    model = save(tmp_path, lora_alpha=6)
    as_saved, _ = checked(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's compiler, while it is imported
        whole = torch.nn.DataParallel(torch.compile(model)) if wrapped else model
    state = {name: tensor for name, tensor in whole.state_dict().items() if "lora_" in name}
    save_file(state, tmp_path / "adapter_model.safetensors")
    result, path = checked(tmp_path)
    assert [(m.layer, m.module, m.rank, m.scaling) for m in result.spec.modules] == [
        (m.layer, m.module, m.rank, m.scaling) for m in as_saved.spec.modules
    ]
    notices = " ".join(result.report.notices)
    assert ("_orig_mod." in notices, " module." in notices, "'default'" in notices) == (wrapped, wrapped, True)
    for (layer, module), lora in load_weights(path, result.spec).items():
        delta = lora.scaling * torch.from_numpy(lora.b) @ torch.from_numpy(lora.a)
        theirs = lora_layers(model)[f"model.layers.{layer}.{module}"].get_delta_weight("default")
        torch.testing.assert_close(delta, theirs, rtol=1e-5, atol=1e-5)


NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.11.self_attn.k_proj", "lm_head")
TARGETS = st.sampled_from(
    ["q_proj", "proj", "self_attn.q_proj", "1.mlp.up_proj", "lm_head", "head", "model.lm_head", *NAMES, ""]
)


EXPRESSIONS = st.sampled_from(
    [
        r".*\.(q|k)_proj", "q_proj", ".*", r"model\.layers\.\d\..*", r".*layers\.[\d]{1,}\.mlp.*?", r".*\b1\..*",
        "(?:lm_)?head", "self_attn", "x|.*up_proj", "All-Linear",
    ]
)  # fmt: skip
PATTERNS = st.sampled_from(["layers", "h", "layer[s]", "model.layers", r"model\.layers|x", "lay.*", "q", ""])


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=400)
@given(
    targets=st.lists(TARGETS, min_size=1, max_size=4) | EXPRESSIONS,
    excluded=st.lists(TARGETS, max_size=2) | EXPRESSIONS,
    layers=st.none() | st.integers(0, 12) | st.lists(st.integers(0, 12), max_size=3),
    pattern=st.none() | PATTERNS | st.lists(PATTERNS.filter(bool), max_size=2),
    name=st.sampled_from(NAMES),
)
def test_what_the_config_selects_is_what_peft_adapts(
    targets: Any, excluded: Any, layers: Any, pattern: Any, name: str
) -> None:
    if isinstance(targets, str):
        layers = None  # PEFT refuses such a config
    if layers is None:
        pattern = None
    if excluded == "All-Linear":
        excluded = None
    fields = {
        "target_modules": targets, "exclude_modules": excluded, "layers_to_transform": layers,
        "layers_pattern": pattern
    }  # fmt: skip
    linears = {name for name in NAMES if name != "lm_head"}
    of_peft = LoraConfig(**fields | ({"target_modules": linears} if targets == "All-Linear" else {}))
    theirs = bool(check_target_module_exists(of_peft, name))
    problems = ProblemList()
    adapter_config = read_adapter_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}, problems)
    assert adapter_config is not None
    assert adapter_config.selection.is_known
    assert adapter_config.selection.selects(name) == theirs


TOGETHER: dict[str, tuple[Any, ...]] = {
    "lora_bias": (False, True), "use_dora": (False, True), "megatron_config": (None, {}, {"fp16": True}),
    "init_lora_weights": (True, False, None, "gaussian", "eva"), "target_modules": (["q_proj"], "all-linear", "q.*"),
    "layers_to_transform": (None, [0], [], 0), "layers_pattern": (None, "layers", ["layers"], [], ""),
}  # fmt: skip


def test_fields_that_exclude_each_other_are_those_of_peft() -> None:
    refused = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for values in itertools.product(*TOGETHER.values()):
            fields = dict(zip(TOGETHER, values, strict=True))
            config, problems = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}, ProblemList()
            ours = read_adapter_config(config, problems)
            try:
                LoraConfig(**fields)
            except ValueError:
                assert ours is None, fields
                refused.update(problem.field for problem in problems.problems())
            else:
                assert ours is not None, (fields, problems.problems())
    assert set(refused) == {"lora_bias", "init_lora_weights", "use_dora", "layers_to_transform", "layers_pattern"}


def test_peft_drops_what_the_config_leaves_out(tmp_path: Path) -> None:
    """The reason for refusing it: the same file would be another adapter there."""
    save(tmp_path, target_modules=["q_proj", "v_proj"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert {name.rpartition(".")[2] for name in lora_layers(loaded)} == {"q_proj"}
    assert list(problems_of(lambda: checked(tmp_path))) == ["untargeted_modules"]


def test_a_torch_file_renamed_to_safetensors_is_never_unpickled(tmp_path: Path) -> None:
    save(tmp_path)
    for legacy in (False, True):
        buffer = io.BytesIO()
        torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
        (tmp_path / "adapter_model.safetensors").write_bytes(buffer.getvalue())
        assert next(iter(problems_of(lambda: checked(tmp_path)))) == "not_safetensors"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert up_to_date(page) == page, "run: python tests/support/adapter_page.py"


def test_a_changed_table_is_noticed() -> None:
    page = PAGE.read_text("utf-8")
    for name in PARTS:
        begin = page.index(f"<!-- generated: {name} -->")
        stale = page[: page.index("\n", begin) + 1] + "old\n" + page[page.index("<!-- end -->", begin) :]
        assert stale != page
        assert up_to_date(stale) == page


def test_commands_on_the_page_exist() -> None:
    """Options that the page names are options that the command line has."""
    sources = "".join(path.read_text("utf-8") for path in (Path(PAGE).parents[1] / "api" / "cli").rglob("*.py"))
    sources += "".join(f'"{flag(name)}"' for name in ServerSettings.model_fields)
    options = set(re.findall(r"--[a-z-]{3,}", re.sub(r"<!--.*?-->", "", PAGE.read_text("utf-8"))))
    assert len(options) >= 3
    assert [option for option in sorted(options) if f'"{option}"' not in sources] == []
