import io
import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.errors import AdapterInvalid, ProblemList
from adapter_store.formats.adapter_config import (
    FIELD_RULES,
    MAX_CONFIG_BYTES,
    AdapterConfig,
    Decision,
    parse_config,
    read_adapter_config,
)
from adapter_store.spec import BaseShapes
from adapter_store.validation.validate import check_adapter, max_names


def refusals(config: Any) -> dict[str, str]:
    problems = ProblemList()
    assert read_adapter_config(config, problems) is None
    return {p.field: p.message for p in problems.problems()}


def accepted(config: Any) -> AdapterConfig:
    problems = ProblemList()
    adapter_config = read_adapter_config(config, problems)
    assert adapter_config is not None, problems.problems()
    return adapter_config


def test_a_config_as_peft_saves_it(build: Any) -> None:
    adapter_config = accepted(build.config())
    assert (adapter_config.r, adapter_config.lora_alpha, adapter_config.scaling("model.layers.0.mlp.up_proj")) == (4, 8, 2.0)


def test_scaling_of_rslora_and_patterns(build: Any) -> None:
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
    "use_dora": True,
    "use_qalora": True,
    "alora_invocation_tokens": [1, 2],
    "modules_to_save": ["lm_head"],
    "lora_bias": True,
    "trainable_token_indices": [5],
    "target_parameters": ["experts.w"],
    "layer_replication": [[0, 2]],
    "fan_in_fan_out": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 1},
    "velora_config": {"rank": 1},
    "monteclora_config": {"x": 1},
    "kasa_config": {"beta": 1},
}


def test_every_refused_field_has_a_case() -> None:
    assert REFUSED_VALUES.keys() == {k for k, rule in FIELD_RULES.items() if rule.decision is Decision.REFUSED}


@pytest.mark.parametrize("field", sorted(REFUSED_VALUES))
def test_refused_fields_say_what_was_found_and_the_way_out(field: str, build: Any) -> None:
    found = refusals(build.config(**{field: REFUSED_VALUES[field]}))
    assert list(found) == [field]
    assert str(REFUSED_VALUES[field])[:10] in found[field]
    assert FIELD_RULES[field].remedy[1:] in found[field]
    accepted(build.config(**{field: None}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("peft_type", None), ("peft_type", 7),
        ("task_type", "SEQ_CLS"), ("task_type", 1),
        ("r", 0), ("r", -5), ("r", True), ("r", 8.5), ("r", "8"), ("r", None), ("r", [8]),
        ("lora_alpha", math.nan), ("lora_alpha", math.inf), ("lora_alpha", "16"), ("lora_alpha", True),
        ("lora_alpha", None),
        ("use_rslora", "false"), ("use_rslora", 1),
        ("bias", "all"), ("bias", "lora_only"),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"), ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "next_year"), ("init_lora_weights", 3),
        ("rank_pattern", [1]), ("alpha_pattern", "x"), ("peft_version", 2**70),
    ],
)  # fmt: skip
def test_bad_values_name_the_field(field: str, value: Any, build: Any) -> None:
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
        ("future_key", []), ("future_key", False), ("base_model_name_or_path", None),
    ],
)  # fmt: skip
def test_harmless_values(field: str, value: Any, build: Any) -> None:
    accepted(build.config(**{field: value}))


def test_unknown_key_is_named(build: Any) -> None:
    assert "= 7" in refusals(build.config(future_strength=7))["future_strength"]


@pytest.mark.parametrize("key", [r"(.*a){20}x", "q_proj|v_proj", r"layers\.[01]\.mlp"])
def test_uploaded_expressions_are_refused_and_never_run(key: str, build: Any) -> None:
    started = time.perf_counter()
    found = refusals(build.config(rank_pattern={key: 4}, alpha_pattern={key: 4}))
    assert len(found) == 2
    assert all("regular expression" in message for message in found.values())
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(("pattern", "value"), [("rank_pattern", 0), ("rank_pattern", True), ("alpha_pattern", "1")])
def test_pattern_values_are_checked(pattern: str, value: Any, build: Any) -> None:
    assert list(refusals(build.config(**{pattern: {"q_proj": value}}))) == [f"{pattern}['q_proj']"]


def test_every_problem_is_listed(build: Any) -> None:
    found = refusals(build.config(r=0, use_dora=True, bias="all", lora_alpha="x", modules_to_save=["a"]))
    assert set(found) == {"r", "use_dora", "bias", "lora_alpha", "modules_to_save"}


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
def test_more_names_than_a_base_has_modules(field: str, build: Any, base: BaseShapes, problems_of: Any) -> None:
    """Each is held against each module: a config may have a MiB of them, which takes seconds."""

    def config(count: int) -> Any:
        names = [f"other.{number}" for number in range(count)]
        trained = ["q_proj", "v_proj"] if field == "target_modules" else []
        return build.config(**{field: names + trained if "modules" in field else dict.fromkeys(names, 4)})

    assert max_names(base) == 1024
    accepted(config(1000))
    found = refusals(config(1 << 15))
    assert list(found) == [field]
    assert f"has {len(config(1 << 15)[field])} entries; 1024 are the most" in found[field]
    large = replace(base, num_layers=100)
    assert max_names(large) == 2 * 100 * len(base.modules) == 1400
    data = build.file()
    for shapes, count, is_fine in ((base, 1000, True), (base, 1300, False), (large, 1300, True), (large, 1500, False)):
        if is_fine:
            check_adapter(config(count), io.BytesIO(data), len(data), shapes, 16, allow_partial=True)
            continue
        found = problems_of(lambda: check_adapter(config(count), io.BytesIO(data), len(data), shapes, 16))  # noqa: B023
        assert f"too_long_{field}" in found


def test_hostile_objects(build: Any) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert "deeper" in " ".join(refusals(build.config(peft_version=deep)).values())
    assert "no value" in " ".join(refusals(build.config(revision=b"x")).values())
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


def test_overflowing_number_is_no_number(build: Any) -> None:
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
