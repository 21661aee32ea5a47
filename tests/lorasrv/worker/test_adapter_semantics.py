"""Every honoured field of adapter_config.json through the whole engine: logits are PEFT's, in one batch of them all,
and are others than the base's and than those of the same weights without the field."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import gptq_layers, peft_adapter
from safetensors.torch import load_file, save_file
from served_logits import last_logits

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.weights import LoraTensors
from sgmv_kernels.cpu_runtime.kernel_compiler import kernel_address

Tiny = dict[str, Callable[..., Path]]
LONG = "qwen2", "qwen3", "gemma2", "granite"
FAMILIES = ["llama", "gemma3", "olmo2", *(pytest.param(f, marks=pytest.mark.long) for f in LONG)]
QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
APART = 0.02
"""Logits of different adapters differ by more; those of the same by 1e-3 at most."""


@dataclass(frozen=True)
class Feature:
    """What PEFT is given, what the config says without the feature, and how that is refused, if it is."""

    config: dict[str, Any]
    without: dict[str, Any]
    refused_as: str | None = None


FEATURES = {
    "r": Feature({"r": 3, "lora_alpha": 7, "target_modules": QV}, {"r": 4}, "rank_mismatch"),
    "lora_alpha": Feature({"r": 4, "lora_alpha": 7, "target_modules": QV}, {"lora_alpha": 14}),
    "use_rslora": Feature({"r": 5, "lora_alpha": 6, "use_rslora": True, "target_modules": QV}, {"use_rslora": False}),
    "rank_pattern": Feature(
        {"r": 4, "lora_alpha": 6, "target_modules": ALL, "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}},
        {"rank_pattern": {}},
        "rank_mismatch",
    ),
    "alpha_pattern": Feature(
        {"r": 4, "lora_alpha": 2, "target_modules": ALL, "alpha_pattern": {"0.self_attn.v_proj": 30, "down_proj": 9}},
        {"alpha_pattern": {}},
    ),
    "all of them": Feature(
        {
            "r": 4,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ALL,
            "rank_pattern": {"k_proj": 7, "^model.layers.2.mlp.gate_proj": 1},
            "alpha_pattern": {"k_proj": 9, r"mlp\.down_proj": 1},
        },
        {"use_rslora": False},
    ),
    "regular expressions": Feature(
        {
            "r": 4,
            "lora_alpha": 2,
            "target_modules": ALL,
            "rank_pattern": {r"layers\.[02]\.mlp\.(up|down)_proj": 2},
            "alpha_pattern": {r"\w+\.1\..*|q_proj": 25},
        },
        {"alpha_pattern": {}},
    ),
    "layers_to_transform": Feature(
        {"r": 4, "lora_alpha": 8, "target_modules": QV, "layers_to_transform": [1]},
        {"layers_to_transform": None},
        "partial_adapter",
    ),
    "modules of some layers": Feature(
        {"r": 4, "lora_alpha": 8, "target_modules": ["layers.0.mlp.up_proj", "layers.2.self_attn.k_proj"]},
        {"target_modules": ["up_proj", "k_proj"]},
        "partial_adapter",
    ),
    "use_dora": Feature(
        {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_dora": True}, {"use_dora": False}, "use_dora_mismatch"
    ),
    "use_dora with use_rslora and ranks": Feature(
        {"r": 3, "use_dora": True, "use_rslora": True, "target_modules": QV, "rank_pattern": {"v_proj": 6}},
        {"use_rslora": False},
    ),
    "norms in modules_to_save": Feature(
        {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["norm"]},
        {"modules_to_save": None},
        "untargeted_modules",
    ),
    "the final norm and DoRA": Feature(
        {"r": 4, "target_modules": ["k_proj", "down_proj"], "modules_to_save": ["model.norm"], "use_dora": True},
        {"lora_alpha": 16},
    ),
    "lora_bias": Feature(
        {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": ["q_proj", "down_proj"],
            "lora_bias": True,
            "init_lora_weights": True,
        },
        {"lora_bias": False},
        "lora_bias_mismatch",
    ),
    "a pattern of modules": Feature(
        {"r": 4, "lora_alpha": 8, "target_modules": r".*layers\.[02]\.mlp\.(up|down)_proj"}, {"lora_alpha": 4}
    ),
}


def changed(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The same weights under another config."""
    config = Path(shutil.copytree(folder, target)) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_honoured_field_in_one_batch(tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any, family: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = tiny_hf_checkpoints[family]()
    served = serve(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    wanted: list[tuple[str | None, list[int], torch.Tensor]] = []
    for i, (name, feature) in enumerate(FEATURES.items()):
        prompt = torch.randint(3, 384, (7 + 5 * i,), generator=generator).tolist()
        model = peft_adapter(directory, tmp_path / f"f{i}", seed=40 + i, **feature.config)
        served.llm.add_adapter(f"f{i}", tmp_path / f"f{i}")
        wanted.append((f"f{i}", prompt, last_logits(model, prompt)))
        wanted.append((None, prompt, last_logits(plain, prompt)))
        without = changed(tmp_path / f"f{i}", tmp_path / f"w{i}", feature.without)
        if feature.refused_as is None:
            served.llm.add_adapter(f"w{i}", without)
            continue
        with pytest.raises(AdapterInvalid) as refused:
            served.llm.add_adapter(f"w{i}", without)
        assert {p.code for p in refused.value.problems} == {feature.refused_as}, name
    logits = served.first_logits([w[1] for w in wanted], [w[0] for w in wanted])
    assert max(served.batches) > len(FEATURES) // 2, "the batch was not mixed"
    for (name, _, want), got in zip(wanted, logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    for i, (name, feature) in enumerate(FEATURES.items()):
        adapted, base = logits[2 * i], logits[2 * i + 1]
        assert (adapted - base).abs().max() > APART, f"{name} changes nothing"
        if feature.refused_as is None:
            [dropped] = served.first_logits([wanted[2 * i][1]], [f"w{i}"])
            assert (adapted - dropped).abs().max() > APART, f"{name} is not looked at"


BIASED = {
    "lora_only": {"bias": "lora_only", "target_modules": QV},
    "all": {"bias": "all", "target_modules": ["q_proj", "up_proj"]},
    "beside lora_B, too": {"bias": "all", "lora_bias": True, "init_lora_weights": True, "target_modules": ALL},
    "DoRA": {"bias": "lora_only", "use_dora": True, "target_modules": ALL},
    "DoRA over the base's": {"use_dora": True, "target_modules": QV},
}


def test_biases_of_a_base_that_has_some(tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any) -> None:
    directory = tiny_hf_checkpoints["qwen2"]()
    served = serve(directory)
    prompt = list(range(20, 50))
    models = {}
    for i, (name, config) in enumerate(BIASED.items()):
        models[name] = peft_adapter(directory, tmp_path / f"b{i}", seed=i, r=3, lora_alpha=5, **config)
        served.llm.add_adapter(f"b{i}", tmp_path / f"b{i}")
    logits = served.first_logits([prompt] * (len(models) + 1), [*(f"b{i}" for i in range(len(models))), None])
    for (name, model), got in zip(models.items(), logits, strict=False):
        want = last_logits(model, prompt)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        assert (got - logits[-1]).abs().max() > APART, name
    for changes, code in (({"bias": "none"}, "bias_mismatch"), ({"bias": "some"}, "unsupported_bias")):
        with pytest.raises(AdapterInvalid) as refused:
            served.llm.add_adapter("x", changed(tmp_path / "b0", tmp_path / code, changes))
        assert {p.code for p in refused.value.problems} == {code}
    with pytest.raises(AdapterInvalid, match=r"k_proj\.bias") as refused:
        served.llm.add_adapter("x", changed(tmp_path / "b0", tmp_path / "all", {"bias": "all"}))
    assert {p.code for p in refused.value.problems} == {"partial_adapter"}


def test_a_partial_adapter_is_the_same_content_allowed_or_not(
    tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any
) -> None:
    """Which modules have tensors is what counts: the config that promised more changes neither logits nor key."""
    directory = tiny_hf_checkpoints["qwen2"]()
    served = serve(directory)
    feature = FEATURES["layers_to_transform"]
    model = peft_adapter(directory, tmp_path / "mia", **feature.config)
    whole = served.llm.add_adapter("mia", tmp_path / "mia")
    without = changed(tmp_path / "mia", tmp_path / "more", feature.without)
    partial = served.llm.add_adapter("more", without, allow_partial=True)
    assert partial.key == whole.key
    prompt = list(range(20, 40))
    for logits in served.first_logits([prompt, prompt], ["mia", "more"]):
        torch.testing.assert_close(logits, last_logits(model, prompt), rtol=1e-3, atol=1e-3)


def test_int8_is_peft_with_the_matrices_of_the_codes(tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any) -> None:
    """Both forms of one content, and the base, in one batch and alone."""
    directory = tiny_hf_checkpoints["llama"]()
    served = serve(directory)
    model = peft_adapter(directory, tmp_path / "mia", r=5, lora_alpha=6, use_rslora=True)
    kept = served.llm.add_adapter("mia", tmp_path / "mia")
    coded = served.llm.add_adapter("mia", tmp_path / "mia", stored="int8")
    assert (coded.version, coded.key == kept.key) == (2, False)
    prompt = list(range(20, 40))
    names = ["mia@2", "mia@1", None, "mia@2", "mia@1"]
    logits = served.first_logits([prompt] * 5, names)
    for name, together in zip(names, logits, strict=True):
        [alone] = served.first_logits([prompt], [name])
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1], last_logits(model, prompt), rtol=1e-3, atol=1e-3)
    for module in model.modules():
        if getattr(module, "lora_A", None):
            a, b = module.lora_A["default"].weight.data, module.lora_B["default"].weight.data
            codes = CodedTensors(LoraTensors(5, 1.0, a.numpy(), b.numpy()), "F32").dequantized()
            for weight, replaced in zip((a, b), codes, strict=True):
                weight.copy_(torch.from_numpy(replaced))
    torch.testing.assert_close(logits[0], last_logits(model, prompt), rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 5e-3


def test_no_step_waits_for_the_kernels_of_few_adapters(
    tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are loaded with the adapter: compiling one takes seconds."""
    asked: list[tuple[str, str]] = []

    def noting(module: str, function: str) -> int:
        asked.append((module, function))
        return kernel_address(module, function)

    directory = tiny_hf_checkpoints["llama"]()
    served = serve(directory)
    monkeypatch.setattr("sgmv_kernels.cpu_ops.backend.kernel_address", noting)
    peft_adapter(directory, tmp_path / "plain")
    peft_adapter(directory, tmp_path / "dora", use_dora=True)
    served.llm.add_adapter("plain", tmp_path / "plain")
    served.llm.add_adapter("coded", tmp_path / "plain", stored="int8")
    served.llm.add_adapter("dora", tmp_path / "dora")
    wanted_by = {"plain": [], "coded": [("sgmv", "fp32_codes")], "dora": [("affine", "rows")]}
    for name, wanted in wanted_by.items():
        asked.clear()
        served.first_logits([[5, 6, 7]], [name])
        assert asked == wanted


def test_qalora_pools_the_inputs_of_gptq_layers_only(tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any) -> None:
    """PEFT ignores the field on other layers, whose lora_A has all inputs; both kinds in one batch, and in int8."""
    directory = tiny_hf_checkpoints["llama"]()
    served, prompt = serve(directory), list(range(20, 40))
    lora = {"r": 5, "lora_alpha": 2, "target_modules": ALL, "use_qalora": True, "qalora_group_size": 32}
    with gptq_layers():
        pooled = peft_adapter(directory, tmp_path / "pooled", **lora)
    models = {"pooled": pooled, "plain": peft_adapter(directory, tmp_path / "plain", **lora)}
    for name in models:
        served.llm.add_adapter(name, tmp_path / name)
    served.llm.add_adapter("coded", tmp_path / "pooled", stored="int8")
    *logits, coded, base = served.first_logits([prompt] * 4, [*models, "coded", None])
    for model, got in zip(models.values(), logits, strict=True):
        torch.testing.assert_close(got, last_logits(model, prompt), rtol=1e-3, atol=1e-3)
        assert (got - base).abs().max() > APART
    assert 1e-4 < (coded - logits[0]).norm() / (logits[0] - base).norm() < 0.05
    refused = {
        "invalid_qalora_group_size": {"qalora_group_size": 1},
        "shape_mismatch": {"qalora_group_size": 16},
        "unsupported_use_qalora": {"lora_bias": True},
    }
    for code, changes in refused.items():
        folder = changed(tmp_path / "pooled", tmp_path / code, changes)
        if "lora_bias" in changes:
            tensors = load_file(folder / "adapter_model.safetensors")
            biases = {f"{name[:-6]}bias": t[:, 0].clone() for name, t in tensors.items() if "lora_B" in name}
            save_file(tensors | biases, folder / "adapter_model.safetensors")
        with pytest.raises(AdapterInvalid) as error:
            served.llm.add_adapter(code, folder)
        assert code in {p.code for p in error.value.problems}


def test_fan_in_fan_out_is_refused_and_means_nothing_here(
    tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any
) -> None:
    """PEFT takes it for False where the base is no Conv1D, with a warning; here it is refused with that way out."""
    directory = tiny_hf_checkpoints["llama"]()
    served = serve(directory)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "fan_in_fan_out": True}
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model = peft_adapter(directory, tmp_path / "mia", **lora)
    said_true = changed(tmp_path / "mia", tmp_path / "true", {"fan_in_fan_out": True})
    with pytest.raises(AdapterInvalid, match="set it to false"):
        served.llm.add_adapter("true", said_true)
    served.llm.add_adapter("false", changed(said_true, tmp_path / "false", {"fan_in_fan_out": False}))
    prompt = list(range(20, 40))
    [logits] = served.first_logits([prompt], ["false"])
    torch.testing.assert_close(logits, last_logits(model, prompt), rtol=1e-3, atol=1e-3)


def test_an_mlx_copy_gives_the_logits_of_the_original(tiny_hf_checkpoints: Tiny, tmp_path: Path, serve: Any) -> None:
    directory = tiny_hf_checkpoints["qwen3"]()
    served = serve(directory)
    lora = {"r": 5, "lora_alpha": 3.7 * 5, "target_modules": ALL, "layers_to_transform": [1, 2]}
    model = peft_adapter(directory, tmp_path / "peft", **lora)
    (tmp_path / "mlx").mkdir()
    tensors = {}
    for name, tensor in load_file(tmp_path / "peft" / "adapter_model.safetensors").items():
        name = name.removeprefix("base_model.model.").replace("lora_A.weight", "lora_a")
        tensors[name.replace("lora_B.weight", "lora_b")] = tensor.T.contiguous()
    save_file(tensors, tmp_path / "mlx" / "adapters.safetensors", metadata={"format": "mlx"})
    parameters = {"rank": 5, "scale": 3.7, "dropout": 0.0}
    run = {"fine_tune_type": "lora", "lora_parameters": parameters, "num_layers": 2, "model": "someone/x"}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(run))
    served.llm.add_adapter("peft", tmp_path / "peft")
    served.llm.add_adapter("mlx", tmp_path / "mlx")
    prompt = list(range(30, 50))
    original, copy, base = served.first_logits([prompt] * 3, ["peft", "mlx", None])
    assert torch.equal(original, copy)
    torch.testing.assert_close(copy, last_logits(model, prompt), rtol=1e-3, atol=1e-3)
    assert (copy - base).abs().max() > APART
