"""Scaling, ranks and names against PEFT itself, on a tiny model: what PEFT computes is what the adapter_config means."""

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from adapter_store.errors import AdapterInvalid, ProblemList
from adapter_store.formats.adapter_config import FIELD_RULES, read_adapter_config
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.formats.weights import load_weights
from adapter_store.spec import BaseShapes
from adapter_store.validation.validate import CheckedAdapter, check_files

Save = Callable[..., tuple[Any, Path]]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Make a PEFT model with random A and B, save it: (model, folder)."""

    def save_adapter(adapter_name: str = "default", **options: Any) -> tuple[Any, Path]:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(
                tiny_llama(), LoraConfig(task_type="CAUSAL_LM", **options), adapter_name=adapter_name
            )
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter)
            model.save_pretrained(tmp_path)
        return model, tmp_path

    return save_adapter


CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6, "^model.layers.0.self_attn.o_proj": 5, "_proj": 9},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "q_proj": 5, r"mlp\.down_proj": 1},
    },
    "rslora patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"self_attn.k_proj": 2},
        "alpha_pattern": {"self_attn.k_proj": 5, "mlp.gate.proj": 11},
    },
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "regex targets": {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.0\..*(up|down)_proj"},
    "gaussian": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "mica"},
}


def checked(folder: Path, base: BaseShapes) -> tuple[CheckedAdapter, Path]:
    found = read_peft_dir(folder)
    return check_files(found.config, found.weights_path, base, 16), found.weights_path


def lora_layers(model: Any) -> dict[str, LoraLayer]:
    layers = model.base_model.model.named_modules()
    return {name: module for name, module in layers if isinstance(module, LoraLayer)}


@pytest.mark.parametrize("case", CASES)
def test_ranks_scalings_and_deltas_are_pefts(case: str, save: Save, base: BaseShapes) -> None:
    model, folder = save(**CASES[case])
    result, path = checked(folder, base)
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


def test_scalings_of_the_pattern_cases_vary(save: Save, base: BaseShapes) -> None:
    _, folder = save(**CASES["patterns"])
    result, _ = checked(folder, base)
    assert len({(m.rank, m.scaling) for m in result.spec.modules}) > 3


def test_every_field_of_pefts_config_has_a_decision() -> None:
    """A field that came with another PEFT: decide what it means before anything is served with it."""
    assert {field.name for field in fields(LoraConfig)} - FIELD_RULES.keys() == set()


def test_the_patterns_first_match_is_pefts(save: Save, base: BaseShapes) -> None:
    """PEFT saves patterns sorted, and what it loads is that order: so do we."""
    _, folder = save(r=4, target_modules=["q_proj"], alpha_pattern={"q_proj": 3, "0.self_attn.q_proj": 5})
    config = json.loads((folder / "adapter_config.json").read_text())
    result, _ = checked(folder, base)
    for m in result.spec.modules:
        key = get_pattern_key(config["alpha_pattern"].keys(), f"model.layers.{m.layer}.{m.module}")
        assert m.scaling == config["alpha_pattern"][key] / 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "unsupported_use_dora"),
    "bias": ({"bias": "lora_only"}, "unsupported_bias"),
    "lora_bias": ({"lora_bias": True}, "unsupported_lora_bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "unsupported_modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "unsupported_init"),
    "olora": ({"init_lora_weights": "olora"}, "unsupported_init"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "unsupported_trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "unsupported_alora_invocation_tokens"),
    "layer_replication": ({"layer_replication": [[0, 2], [0, 2]]}, "unsupported_layer_replication"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "unsupported_embedding"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "unsupported_embedding"),
    "rank regex": ({"rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2}}, "unsupported_rank_pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_saves_and_we_refuse(case: str, save: Save, base: BaseShapes) -> None:
    options, code = REFUSED[case]
    _, folder = save(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)
    with pytest.raises(AdapterInvalid) as caught:
        checked(folder, base)
    assert code in {problem.code for problem in caught.value.problems}


def test_a_named_adapter_is_saved_one_level_down(save: Save, base: BaseShapes) -> None:
    _, folder = save(adapter_name="pirate", r=4, target_modules=["q_proj"])
    assert read_peft_dir(folder).subdirectory == "pirate"
    assert checked(folder, base)[0].report.modules_matched == 2


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_state_dict_as_in_memory_is_read_as_the_saved_one(wrapped: bool, save: Save, base: BaseShapes) -> None:
    """Names by torch itself: PEFT's model, compiled and given to data parallelism."""
    model, folder = save(r=4, target_modules=["q_proj"], lora_alpha=6)
    as_saved, _ = checked(folder, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's compiler, while it is imported
        whole = torch.nn.DataParallel(torch.compile(model)) if wrapped else model
    state = {name: tensor for name, tensor in whole.state_dict().items() if "lora_" in name}
    save_file(state, folder / "adapter_model.safetensors")
    result, path = checked(folder, base)
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


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    targets=st.lists(TARGETS, min_size=1, max_size=4),
    excluded=st.lists(TARGETS, max_size=2),
    layers=st.none() | st.integers(0, 12) | st.lists(st.integers(0, 12), max_size=3),
    pattern=st.sampled_from([None, "layers", ["layers"], []]),
    name=st.sampled_from(NAMES),
)
def test_what_the_config_targets_is_what_peft_targets(
    targets: list[str], excluded: list[str], layers: Any, pattern: Any, name: str
) -> None:
    if not layers and pattern:
        pattern = None  # PEFT refuses such a config
    fields = {
        "target_modules": targets, "exclude_modules": excluded, "layers_to_transform": layers,
        "layers_pattern": pattern,
    }  # fmt: skip
    theirs = bool(check_target_module_exists(LoraConfig(**fields), name))
    problems = ProblemList()
    adapter_config = read_adapter_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}, problems)
    assert adapter_config is not None
    layer = None if name == "lm_head" else int(name.split(".")[2])
    assert adapter_config.targets(layer, name) == theirs


def test_peft_drops_what_the_config_leaves_out(save: Save, base: BaseShapes) -> None:
    """The reason for refusing it: the same file would be another adapter there."""
    _, folder = save(r=4, target_modules=["q_proj", "v_proj"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    assert {name.rpartition(".")[2] for name in lora_layers(loaded)} == {"q_proj"}
    with pytest.raises(AdapterInvalid) as caught:
        checked(folder, base)
    assert [problem.code for problem in caught.value.problems] == ["untargeted_modules"]


def test_a_torch_file_renamed_to_safetensors_is_never_unpickled(save: Save, base: BaseShapes) -> None:
    _, folder = save(r=4, target_modules=["q_proj"])
    for legacy in (False, True):
        buffer = io.BytesIO()
        torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=not legacy)
        (folder / "adapter_model.safetensors").write_bytes(buffer.getvalue())
        with pytest.raises(AdapterInvalid) as caught:
            checked(folder, base)
        assert caught.value.problems[0].code == "not_safetensors"
