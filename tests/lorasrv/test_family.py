"""Families as data: what the TOML files make of real configurations, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorasrv.errors import ConfigError, CorruptModel, UnsupportedModel
from lorasrv.loaders import open_checkpoint, state_dict_fp32
from lorasrv.models.family import SPEC_DIR, detect, load_families, tensor_shapes, token_ids
from lorasrv.models.rope import rope_tables
from lorasrv.models.spec import RopeSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
QWEN2 = LLAMA | {"max_window_layers": 1, "sliding_window": 32}


def llama(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


def test_llama_config_is_read_field_by_field() -> None:
    spec = detect("LlamaForCausalLM").spec_from_hf(LLAMA)
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 2, 64, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 16, 100)
    assert (spec.norm_eps, spec.activation, spec.rope) == (1e-5, "silu", RopeSpec(theta=500000.0))
    assert (spec.eos_token_ids, spec.bos_token_id, spec.tied_head, spec.qkv_bias) == ((2, 3), 1, False, False)
    assert spec.sliding_window is None


def test_absent_keys_take_the_defaults_of_the_family() -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps", "rope_theta")}
    spec = detect("LlamaForCausalLM").spec_from_hf(config)
    assert (spec.num_kv_heads, spec.norm_eps, spec.rope.theta) == (4, 1e-6, 10_000.0)
    assert detect("MistralForCausalLM").spec_from_hf(LLAMA).sliding_window == 4096


def test_null_means_computed_or_none() -> None:
    assert detect("LlamaForCausalLM").spec_from_hf(llama(head_dim=None)).head_dim == 16
    assert detect("MistralForCausalLM").spec_from_hf(llama(sliding_window=None)).sliding_window is None


def test_llama_biases_follow_the_config() -> None:
    spec = detect("LlamaForCausalLM").spec_from_hf(llama(attention_bias=True, mlp_bias=True))
    shapes = tensor_shapes(spec)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (32,)
    assert shapes["model.layers.1.self_attn.o_proj.bias"] == shapes["model.layers.0.mlp.down_proj.bias"] == (64,)


def test_qwen2_has_qkv_biases_and_its_window_only_when_switched_on() -> None:
    family = detect("Qwen2ForCausalLM")
    off = family.spec_from_hf(QWEN2)
    assert (off.qkv_bias, off.attn_out_bias, off.sliding_window) == (True, False, None)
    on = family.spec_from_hf(QWEN2 | {"use_sliding_window": True})
    assert [on.window(layer) for layer in range(2)] == [None, 32]
    kinds = ["sliding_attention", "full_attention"]
    listed = family.spec_from_hf(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})
    assert [listed.window(layer) for layer in range(2)] == [32, None]
    with pytest.raises(CorruptModel, match="layer_types has 1 entries for 2 layers"):
        family.spec_from_hf(QWEN2 | {"use_sliding_window": True, "layer_types": kinds[:1]})


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, RopeSpec(theta=500000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeSpec(500000.0, "linear", 4.0)),
        ({"rope_scaling": LLAMA3_SCALING}, RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 128)),
        ({"rope_parameters": LLAMA3_SCALING | {"rope_theta": 7.0}}, RopeSpec(7.0, "llama3", 8.0, 1.0, 4.0, 128)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, RopeSpec(theta=9.0)),
    ],
)
def test_rope_in_either_spelling(changes: dict[str, Any], expected: RopeSpec) -> None:
    assert detect("LlamaForCausalLM").spec_from_hf(llama(**changes)).rope == expected


@pytest.mark.parametrize("parameters", [{"rope_type": "linear", "factor": 4.0}, LLAMA3_SCALING])
def test_rope_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {k: v for k, v in LLAMA.items() if k not in ("architectures", "rope_theta")}
    config = LlamaConfig(**settings, rope_parameters=parameters | {"rope_theta": 500000.0})
    spec = detect("LlamaForCausalLM").spec_from_hf(config.to_dict())
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours_cos, ours_sin = rope_tables(spec.rope, spec.head_dim, 256, torch.device("cpu"))
    torch.testing.assert_close(ours_cos, cos[0, :, :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours_sin, sin[0, :, :8], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE kind 'yarn' .*known: default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE kind 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu2"}, "activation 'relu2' .*known: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_unknown_parts_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        detect("LlamaForCausalLM").spec_from_hf(llama(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number, not '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, not True"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers 2147483648 is more than 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, not 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"num_key_value_heads": 3}, "multiple of key heads"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
    ],
)
def test_damaged_configurations_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        detect("LlamaForCausalLM").spec_from_hf(llama(**changes))


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'MambaForCausalLM' is not supported; .*LlamaForCausalLM.*qwen2"):
        detect("MambaForCausalLM")


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a"] * 100,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
    "tokenizer.ggml.bos_token_id": 1,
}


def test_gguf_metadata_gives_the_same_spec() -> None:
    spec = detect("llama").spec_from_gguf(GGUF | {"llama.rope.freq_base": 500000.0}, ["output.weight"])
    assert spec == detect("LlamaForCausalLM").spec_from_hf(LLAMA)


def test_gguf_says_ties_and_biases_by_the_tensors_it_holds() -> None:
    spec = detect("llama").spec_from_gguf(GGUF, ["blk.0.attn_q.bias"])
    assert (spec.tied_head, spec.qkv_bias, spec.attn_out_bias, spec.mlp_bias) == (True, True, False, False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"llama.block_count": 2**31}, CorruptModel, "llama.block_count 2147483648 is more than"),
        ({"llama.block_count": [1, 2]}, CorruptModel, "llama.block_count must be a whole number"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModel, "RoPE kind 'yarn'"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "RoPE over 8 of 16 dimensions"),
        ({"tokenizer.ggml.tokens": []}, CorruptModel, "how many tokens"),
    ],
)
def test_gguf_metadata_is_checked(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detect("llama").spec_from_gguf(GGUF | changes, [])


def test_gguf_linear_rope() -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert detect("llama").spec_from_gguf(GGUF | scaling).rope == RopeSpec(10_000.0, "linear", 2.0)


def test_every_tensor_of_every_family_has_a_gguf_name() -> None:
    for family in load_families().families:
        spec = family.spec_from_hf(llama(attention_bias=True, mlp_bias=True))
        names = [family.gguf_name(name) for name in tensor_shapes(spec)]
        assert len(set(names)) == len(names)
        assert {"token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_norm.weight", "output_norm.weight"} <= set(names)


NEW_FAMILY = """
name = "orion"
extends = "qwen2"
[config]
architectures = ["OrionForCausalLM"]
[config.spec]
num_layers = "n_blocks"
activation = { value = "silu" }
attn_out_bias = { value = true }
[gguf]
architectures = ["orion"]
"""


def test_a_new_family_of_known_parts_is_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "orion.toml").write_text(NEW_FAMILY)
    families = load_families([tmp_path])
    spec = families.detect("OrionForCausalLM").spec_from_hf(llama(n_blocks=5))
    assert (spec.family, spec.num_layers, spec.qkv_bias, spec.attn_out_bias) == ("orion", 5, True, True)
    assert families.detect("orion").gguf_name("model.layers.4.self_attn.o_proj.bias") == "blk.4.attn_output.bias"
    assert families.detect("LlamaForCausalLM").name == "llama"
    with pytest.raises(UnsupportedModel):
        detect("OrionForCausalLM")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "family file x.toml is not valid"),
        ("norm = 'rms'", "family file x.toml is not valid: 'name'"),
        ("name = 'x'\nextends = 'nothing'", "family x extends nothing"),
        ("name = 'x'\nextends = 'x'", "its own heir"),
        ("name = 'x'\nextends = 'llama'\nnorm = 'layer'", "norm 'layer' is unknown; choose from rms"),
        ("name = 'x'\nextends = 'llama'\n[config.spec]\nn_layers = 'a'", "unknown fields: n_layers"),
    ],
)
def test_a_wrong_family_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_families([tmp_path])


def test_specs_are_packaged_beside_the_module() -> None:
    assert {path.stem for path in SPEC_DIR.glob("*.toml")} == {"llama", "mistral", "qwen2"}


def test_token_ids_are_distinct_and_valid() -> None:
    assert token_ids([2, 2, None, -1, True, "x", 0]) == (2, 0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_specs_agree_with_transformers_models(tiny_hf_checkpoints: dict[str, Any], family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_hf_checkpoints[family]()
    checkpoint = open_checkpoint(str(path))
    config = AutoConfig.from_pretrained(path)
    spec = checkpoint.spec
    assert spec.head_dim == (24 if family == "mistral" else 16)
    assert (spec.sliding_window, spec.tied_head) == (8 if family == "mistral" else None, family == "qwen2")
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    ours = state_dict_fp32(checkpoint)
    checkpoint.close()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
