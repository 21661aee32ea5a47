"""Target modules against tensors: partial adapters, and tensors that PEFT would drop."""

import io
from typing import Any

import pytest
from store_kit import BASE, build, check, problems_of, put, warnings

from adapter_store.store import AdapterStore
from adapter_store.validation.validate import CheckedAdapter, check_adapter

MLP = ("gate_proj", "up_proj", "down_proj")
PARTIAL: dict[str, tuple[dict[str, Any], int, str]] = {
    "a module more": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, 2, "model.layers.0.self_attn.o_proj"),
    "in one layer": ({"target_modules": ["q_proj", "v_proj", "1.mlp.up_proj"]}, 1, "model.layers.1.mlp.up_proj"),
    "by its full name": (
        {"target_modules": ["q_proj", "v_proj", "model.layers.1.mlp.up_proj"]}, 1, "model.layers.1.mlp.up_proj"
    ),
    "a full name is in every layer's stead": (
        {"target_modules": ["model.layers.0.mlp.up_proj", "q_proj", "v_proj"], "layers_to_transform": [0, 1]}, 1,
        "model.layers.0.mlp.up_proj"
    ),
    "the head": ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, 1, "lm_head"),
    "the head whatever the layers": (
        {"target_modules": ["q_proj", "v_proj", "lm_head"], "layers_to_transform": [0, 1]}, 1, "lm_head"
    ),
    "embeddings": ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, 1, "model.embed_tokens"),
    "all linear ones": ({"target_modules": "All-Linear"}, 10, "model.layers.0.self_attn.k_proj"),
    "all that an expression matches": ({"target_modules": ".*proj"}, 10, "model.layers.0.self_attn.k_proj"),
    "all but some": (
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "o_proj", "gate_proj", "up_proj"]}, 2,
        "model.layers.0.mlp.down_proj"
    )
}  # fmt: skip


@pytest.mark.parametrize("case", PARTIAL)
def test_a_partial_adapter_is_refused_unless_allowed(case: str) -> None:
    changes, missing, first = PARTIAL[case]
    data = build.file()
    config = build.config(**changes)

    def run(**options: bool) -> CheckedAdapter:
        return check_adapter(config, io.BytesIO(data), len(data), BASE, 16, **options)

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
    whole = check_adapter(build.config(), io.BytesIO(data), len(data), BASE, 16)
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
        ({"target_modules": r".*\.0\..*(?:q|v)_proj"}, 1),
        ({"target_modules": "all-linear", "exclude_modules": r".*(mlp|k_proj|o_proj|\.1\.).*"}, 1),
        ({"target_modules": None}, 1),
        ({"target_modules": []}, 1),
        ({"exclude_modules": r".*\.1\..*"}, 1),
        ({"layers_to_transform": [0], "layers_pattern": "model.lay..s"}, 1),
    ],
)
def test_what_the_config_leaves_out_or_does_not_say_is_not_missed(changes: dict[str, Any], layers: int) -> None:
    report = check(build.config(**changes), build.file(layers=layers)).report
    assert (report.modules_matched, report.modules_expected) == (2 * layers, 2 * layers)
    assert report.warnings == ()
    says_nothing = not changes.get("target_modules", "said")
    assert any("has no target_modules" in notice for notice in report.notices) == says_nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["q_proj"]},
        {"layers_to_transform": [0]},
        {"target_modules": r".*\.q_proj"},
        {"exclude_modules": ["0.self_attn.v_proj", "1.self_attn.v_proj"]},
        {"exclude_modules": r"model\.layers\.\d+\.self_attn\.v_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["v_proj", "k_proj", "o_proj", *MLP]},
    ],
)
def test_tensors_that_peft_would_drop_are_refused(changes: dict[str, Any]) -> None:
    [problem] = problems_of(lambda: check(build.config(**changes), build.file())).values()
    assert problem.code == "untargeted_modules"
    assert "leaves out 2 modules" in problem.message


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "(?!vision).*q_proj"}, {"exclude_modules": "(?=x)"}, {"target_modules": "(" * 9},
        {"layers_to_transform": [0], "layers_pattern": r"(?<=a)b"}, {"target_modules": "(.*q{900}){4}"},
    ],
)  # fmt: skip
def test_a_selection_that_is_not_matched_here_is_left_to_the_tensors(fields: dict[str, Any]) -> None:
    report = check(build.config(**fields), build.file()).report
    [unmatched] = [name for name in fields if name != "layers_to_transform"]
    assert [notice for notice in report.notices if notice.startswith(f"{unmatched} is an expression")]


def test_a_partial_adapter_stays_accepted(tmp_path: Any) -> None:
    """Loading checks the content again, but missing modules were accepted at the upload."""
    config, data = build.config(target_modules=["q_proj", "v_proj", "o_proj"]), build.file()
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=16) as store:
        assert "partial_adapter" in problems_of(lambda: store.register("mia", config, put(store, data)))
        ref = store.register("mia", config, put(store, data), allow_partial=True).ref
        assert ref.key == store.register("whole", build.config(), put(store, data)).ref.key
        store.delete("whole")
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=16) as store:
        assert len(store.load(store.resolve("mia").key)) == 4
        assert "partial: 2 of 6" in store.version_history.report(ref).warnings[0]
        assert "partial_adapter" in problems_of(lambda: store.register("poet", config, put(store, data)))
