"""Families as data: what the TOML files make of real configurations, and what they refuse."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import ROPE_OF_MINISTRAL
from tiny_engine import engine_config

from lorasrv.engine.factory import build
from lorasrv.errors import ConfigError, CorruptModel, UnsupportedModel
from lorasrv.models.families import SPEC_DIR, detect, load_families, tensor_shapes, token_ids
from lorasrv.models.loader import open_checkpoint, state_dict_fp32
from lorasrv.models.spec import ModelSpec, RopeSpec
from lorasrv.worker.rope_tables import rope_tables

LLAMA = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": [2, 3]}""")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "ministral3", "mpt", "phi3", "smollm3")
FAMILIES += ("granite", "olmo2")
GEMMA = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {"head_dim": 16}
QWEN2 = LLAMA | {"max_window_layers": 1, "sliding_window": 32}
BARE = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps", "rope_theta")}
KINDS = ["sliding_attention", "full_attention"]
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128}
LLAMA3_ROPE = RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 128)
DEFAULT = {"rope_type": "default", "rope_theta": 7e3}
TWO_ROPES = {"full_attention": LINEAR | {"rope_theta": 5e5}, "sliding_attention": DEFAULT}
GEMMA_ROPES = {"rope": RopeSpec(5e5, "linear", 8.0), "rope_local": RopeSpec(7e3)}
OLD_ROPES = {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": LINEAR}
ENDS = {"eos_token_ids": (2, 3), "bos_token_id": 1}
LLAMA_SPEC = ModelSpec("llama", 2, 64, 96, 4, 2, 16, 100, 256, 1e-5, rope=RopeSpec(5e5), query_scalar=16.0, **ENDS)


def of(family: str, config: dict[str, Any]) -> ModelSpec:
    return detect(f"{family}ForCausalLM").spec_from_hf(config)


def test_llama_config_is_read_field_by_field() -> None:
    assert of("Llama", LLAMA) == LLAMA_SPEC
    shapes = tensor_shapes(of("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}))
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (32,)
    assert shapes["model.layers.1.self_attn.o_proj.bias"] == shapes["model.layers.0.mlp.down_proj.bias"] == (64,)
    assert tensor_shapes(of("Qwen3", QWEN2))["model.layers.1.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize(
    ("family", "config", "facts"),
    [
        ("Llama", BARE, {"num_kv_heads": 4, "norm_eps": 1e-6, "rope": RopeSpec(10_000.0)}),
        ("Llama", LLAMA | {"head_dim": None}, {"head_dim": 16}),
        ("Mistral", LLAMA, {"sliding_window": 4096}),
        ("Mistral", LLAMA | {"sliding_window": None}, {"sliding_window": None}),
        ("Qwen2", QWEN2, {"qkv_bias": True, "attn_out_bias": False, "sliding_window": None}),
        ("Qwen3", QWEN2, {"qk_norm": True, "head_dim": 128, "qkv_bias": False, "sliding_window": None}),
        ("Gemma2", GEMMA, {"rope": RopeSpec(10_000.0), "rope_local": None, "qk_norm": False}),
        ("Gemma3", GEMMA, {"rope": RopeSpec(1e6), "rope_local": RopeSpec(10_000.0), "qk_norm": True}),
        ("Gemma3", GEMMA | {"layer_types": KINDS[1:] * 2}, {"sliding_window": None, "rope_local": None}),
        ("Gemma3", GEMMA | OLD_ROPES, GEMMA_ROPES),
        ("Gemma3", GEMMA | {"rope_parameters": TWO_ROPES}, GEMMA_ROPES),
        ("SmolLM3", LLAMA | {"no_rope_layers": [1, 1]}, {"unrotated_layers": (), "tied_head": True}),
        ("SmolLM3", LLAMA | {"no_rope_layers": [0, 1]}, {"unrotated_layers": (True, False)}),
        ("SmolLM3", LLAMA | {"num_hidden_layers": 4}, {"unrotated_layers": (False, False, False, True)}),
        ("SmolLM3", LLAMA | {"no_rope_layer_interval": 1}, {"unrotated_layers": (True, True)}),
        (
            "Granite",
            LLAMA | {"attention_multiplier": 0.25, "logits_scaling": 8, "residual_multiplier": 0.22},
            {"attention_scale": 0.25, "embedding_scale": 1.0, "residual_scale": 0.22, "logit_divisor": 8.0},
        ),
        ("Granite", LLAMA, {"attention_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0}),
        ("Olmo2", BARE, {"pre_norms": False, "wide_qk_norm": True, "norm_eps": 1e-5, "sliding_window": None}),
        ("Llama", LLAMA | {"rope_scaling": None}, {"rope": RopeSpec(500000.0)}),
        ("Llama", LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}, {"rope": RopeSpec(5e5, "linear", 4.0)}),
        ("Llama", LLAMA | {"rope_scaling": LLAMA3}, {"rope": LLAMA3_ROPE}),
        ("Llama", LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 7.0}}, {"rope": replace(LLAMA3_ROPE, theta=7.0)}),
        ("Llama", LLAMA | {"rope_parameters": DEFAULT}, {"rope": RopeSpec(7e3)}),
    ],
)
def test_configurations_and_defaults_of_families(family: str, config: dict[str, Any], facts: dict[str, Any]) -> None:
    spec = of(family, config)
    assert {name: getattr(spec, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("family", "config", "layers"),
    [
        ("Qwen2", QWEN2 | {"use_sliding_window": True}, [None, 32]),
        ("Qwen2", QWEN2 | {"use_sliding_window": True, "layer_types": KINDS}, [32, None]),
        ("Gemma3", GEMMA | {"num_hidden_layers": 7}, [4096] * 5 + [None, 4096]),
        ("Gemma3", GEMMA | {"sliding_window_pattern": 2}, [4096, None]),
    ],
)
def test_windows_of_layers(family: str, config: dict[str, Any], layers: list[int | None]) -> None:
    spec = of(family, config)
    assert [spec.window(layer) for layer in range(spec.num_layers)] == layers


@pytest.mark.parametrize("said", [{}, {"num_key_value_heads": None}])
@pytest.mark.parametrize(
    "name",
    ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Phi3", "SmolLM3", "Granite", "Olmo2"],
)
def test_key_heads_that_are_not_said_are_those_of_transformers(name: str, said: dict[str, Any]) -> None:
    """Some take null for one a query head, and another number where nothing is said."""
    import transformers
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config |= {"num_attention_heads": 64, "hidden_size": 256} | said
    try:
        wanted = getattr(transformers, f"{name}Config")(**config).num_key_value_heads
    except StrictDataclassFieldValidationError:
        assert said
        return
    assert of(name.removesuffix("Text"), config).num_kv_heads == wanted


def test_gemma_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma2Config, Gemma3TextConfig

    for family, config in (("Gemma2", Gemma2Config(**GEMMA)), ("Gemma3", Gemma3TextConfig(**GEMMA))):
        spec = of(family, GEMMA)
        assert spec.attn_softcap == config.attn_logit_softcapping
        assert spec.final_softcap == config.final_logit_softcapping
        assert (spec.query_scalar, spec.tied_head) == (config.query_pre_attn_scalar, config.tie_word_embeddings)
        assert (spec.activation, spec.sliding_window) == ("gelu_tanh", config.sliding_window)
        assert (spec.post_norms, spec.norms_less_one, spec.embedding_scale) == (True, True, config.hidden_size**0.5)


def test_published_multimodal_configurations_are_those_of_transformers() -> None:
    """Of Gemma 3 4B, which leaves out most of what it has, and of Mistral Small 3.1, whose head is its own."""
    from transformers import Gemma3Config

    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    spec = detect("Gemma3ForConditionalGeneration", "gemma3_text").spec_from_hf(config)
    wanted = Gemma3Config(text_config=text).text_config
    assert (spec.num_heads, spec.num_kv_heads) == (wanted.num_attention_heads, wanted.num_key_value_heads)
    assert (spec.vocab_size, spec.head_dim) == (wanted.vocab_size, wanted.head_dim)
    assert (spec.rope, spec.eos_token_ids, spec.tied_head) == (RopeSpec(1e6, "linear", 8.0), (1, 106), True)
    assert [bool(spec.window(i)) for i in range(34)] == [kind == "sliding_attention" for kind in wanted.layer_types]
    assert spec.names.in_file("model.layers.0.mlp.up_proj.weight").startswith("language_model.model.layers.0.mlp")

    text = LLAMA | {"model_type": "mistral", "sliding_window": None}
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    spec = detect("Mistral3ForConditionalGeneration", "mistral").spec_from_hf(config)
    assert (spec.family, spec.tied_head, spec.sliding_window) == ("mistral", False, None)
    assert spec.names.in_file("lm_head.weight") == "language_model.lm_head.weight"
    with pytest.raises(CorruptModel, match="text_config must be an object"):
        detect("Mistral3ForConditionalGeneration", "mistral").spec_from_hf(config | {"text_config": [1]})
    for changes, key in (
        ({"is_causal": False}, "is_causal False"),
        ({"text_config": text | {"layer_types": KINDS}}, r"layer_types \['"),
    ):
        with pytest.raises(UnsupportedModel, match=f"{key}.* is not supported, only "):
            detect("Mistral3ForConditionalGeneration", "mistral").spec_from_hf(config | changes)
    with pytest.raises(UnsupportedModel, match=r"of 'mistral4' is not supported; known: .*ministral3, mistral"):
        detect("Mistral3ForConditionalGeneration", "mistral4")


def test_gelu_of_a_first_gemma_means_its_tanh_form() -> None:
    for said in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}):
        spec = of("Gemma", GEMMA | {"num_key_value_heads": 1} | said)
        assert (spec.activation, spec.num_kv_heads, spec.tied_head) == ("gelu_tanh", 1, True)
    for refused, names in (
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ):
        with pytest.raises(UnsupportedModel, match=names):
            of("Gemma", GEMMA | refused)


MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "d_model": 96,
    "n_heads": 6,
    "n_layers": 2,
    "vocab_size": 100,
}


def test_mpt_is_read_as_its_code_means_it() -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads in (4, 6, 12):
        spec = of(
            "MPT", MPT | {"n_heads": heads, "attn_config": {"alibi": True, "clip_qkv": None, "attn_impl": "triton"}}
        )
        bias = build_mpt_alibi_tensor(heads, 3)
        assert torch.equal(torch.tensor(spec.alibi_slopes()), bias[:, 0, 1] * -1)
    assert (spec.norm, spec.gated, spec.activation, spec.num_kv_heads) == ("layer", False, "gelu", 12)
    assert (spec.intermediate_size, spec.max_position, spec.tied_head, spec.norm_eps) == (384, 2048, True, 1e-5)
    assert spec.names.in_file("model.layers.1.attn.Wqkv.weight") == "transformer.blocks.1.attn.Wqkv.weight"
    assert tensor_shapes(spec)["model.layers.1.attn.Wqkv.weight"] == (288, 96)
    assert of("Llama", LLAMA).alibi_slopes() == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"expansion_ratio": 2}, "expansion_ratio 2 is not supported, only 4"),
        ({"no_bias": False}, "no_bias False is not supported, only True"),
        ({"norm_type": "rmsnorm"}, "'rmsnorm' is not supported, only 'low_precision_layernorm' or 'layernorm'"),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not supported, only none"),
        (
            {"attn_config": {"attn_type": "multiquery_attention"}},
            r"attn_config\.attn_type 'multiquery_attention' is not",
        ),
        ({"attn_config": {"alibi": False}}, r"attn_config\.alibi False is not supported"),
        ({"attn_config": {"alibi_bias_max": 4}}, r"attn_config\.alibi_bias_max 4 is not supported, only 8"),
        ({"attn_config": {"clip_qkv": 6}}, r"attn_config\.clip_qkv 6 is not supported, only none"),
        ({"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln True"),
        ({"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm True"),
        ({"attn_config": {"softmax_scale": 0.1}}, r"attn_config\.softmax_scale 0\.1"),
    ],
)
def test_settings_of_mpt_that_are_not_served_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        of("MPT", MPT | settings)


def test_a_nested_table_of_another_type_is_damage() -> None:
    with pytest.raises(CorruptModel, match="attn_config must be an object, not 3"):
        of("MPT", MPT | {"attn_config": 3})


def test_phi3_serves_longrope_within_the_original_context_and_turns_a_part_of_a_head() -> None:
    config = LLAMA | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}
    spec = of("Phi3", config)
    assert (spec.max_position, spec.rope.max_position, spec.rope.factors) == (64, 64, (1.0,) * 8)
    assert spec.rope.attention_factor == pytest.approx((1 + 1 / 3) ** 0.5)
    for kind in ("su", "yarn"):
        assert of("Phi3", config | {"rope_scaling": LONGROPE | {"rope_type": kind}}) == spec
    assert of("Phi3", LLAMA | {"partial_rotary_factor": 0.75}).rope.dims == 12


@pytest.mark.parametrize("table", [LINEAR, LLAMA3])
def test_kinds_of_rope_that_phi3_lacks_are_refused_as_in_transformers(table: dict[str, Any]) -> None:
    from huggingface_hub.errors import StrictDataclassClassValidationError
    from transformers import Phi3Config

    with pytest.raises(StrictDataclassClassValidationError, match=f"type field must be .*got {table['rope_type']}"):
        Phi3Config(rope_parameters=table | {"rope_theta": 1e4, ORIGINAL: 64})
    with pytest.raises(UnsupportedModel, match=f"RoPE kind '{table['rope_type']}' .*known: default, longrope"):
        of("Phi3", LLAMA | {"rope_scaling": table})


ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("given", "inner"), [({}, {}), ({}, {ORIGINAL: 128}), ({ORIGINAL: 64}, {}), ({ORIGINAL: 64}, {ORIGINAL: 128})]
)
@pytest.mark.parametrize("longest", [512, 16384])
def test_longrope_of_phi3_equals_transformers(given: dict[str, int], inner: dict[str, Any], longest: int) -> None:
    """Its original context is 4,096 tokens where the top of config.json does not say, whatever the table says."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    table = LONGROPE | {"rope_theta": 500000.0, "short_factor": [1.5] * 8} | inner
    config = LLAMA | given | {"max_position_embeddings": longest}
    spec = of("Phi3", config | {"rope_scaling": table})
    settings = {k: v for k, v in config.items() if k not in ("architectures", "rope_theta")}
    theirs = Phi3RotaryEmbedding(Phi3Config(**settings, rope_parameters=dict(table)))
    assert spec.max_position == min(longest, theirs.config.rope_parameters[ORIGINAL])
    assert spec.rope.attention_factor == pytest.approx(theirs.attention_scaling)


def test_fused_modules_are_single_slices() -> None:
    sites = of("Phi3", LLAMA).sites()
    assert [(site.name, site.modules, site.out_features) for site in sites] == [
        ("qkv", ("self_attn.qkv_proj",), (128,)),
        ("o", ("self_attn.o_proj",), (64,)),
        ("gate_up", ("mlp.gate_up_proj",), (192,)),
        ("down", ("mlp.down_proj",), (64,)),
    ]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        {"rope_type": "yarn", "factor": 40.0},
        YARN | {"beta_fast": 16.0, "beta_slow": 0.5, "truncate": False},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
)
def test_rope_frequencies_equal_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {k: v for k, v in LLAMA.items() if k not in ("architectures", "rope_theta")}
    config = LlamaConfig(**settings, rope_parameters=parameters | {"rope_theta": 500000.0})
    spec = of("Llama", config.to_dict())
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours_cos, ours_sin = rope_tables(spec.rope, spec.head_dim, 256, torch.device("cpu"))
    torch.testing.assert_close(ours_cos, cos[0, :, :8], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours_sin, sin[0, :, :8], rtol=0, atol=1e-6)


SHORT = {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 7}}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Mamba", {}, "'MambaForCausalLM' is not supported; .*LlamaForCausalLM.*qwen2"),
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE kind 'dynamic' .*known: default, linear"),
        ("Llama", {"rope_parameters": {"full_attention": {}, "rope_theta": 1.0}}, "differ by layer"),
        ("Llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("Llama", {"model_type": "qwen3"}, "model_type 'qwen3' is not supported, only 'llama'"),
        ("Gemma3", {"model_type": "gemma2"}, "model_type 'gemma2' is not supported, only 'gemma3_text'"),
        *(("Phi3", {"partial_rotary_factor": part}, "partial_rotary_factor") for part in (0.7, 1.5, 0.0, "x")),
        ("Llama", {"hidden_act": "relu2"}, "activation 'relu2' .*known: silu"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 2}, "'chunked_attention' .*known: sliding_"),
        ("Gemma3", {"sliding_window": None}, "gemma3 without a sliding window"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True .*only False"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "those of full_attention and sliding_att"),
    ],
)
def test_unknown_parts_are_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        of(family, (GEMMA if family == "Gemma3" else LLAMA) | changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"hidden_size": None}, "config.json lacks hidden_size"),
        ("Llama", {"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number, not '2'"),
        ("Llama", {"num_hidden_layers": True}, "num_hidden_layers must be a whole number, not True"),
        ("Llama", {"num_hidden_layers": 2**31}, "num_hidden_layers 2147483648 is more than 4096"),
        ("Llama", {"num_hidden_layers": 0}, "num_hidden_layers must be positive, not 0"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ("Granite", {"attention_multiplier": 0}, r"attention_multiplier must be positive, not 0\.0"),
        ("Granite", {"attention_multiplier": float("inf")}, "attention_multiplier must be positive, not inf"),
        ("Granite", {"attention_multiplier": 1e-200}, "attention_multiplier 1e-200 is too large or too small"),
        ("Granite", {"attention_multiplier": 1e200}, r"attention_multiplier 1e\+200 is too large or too small"),
        ("Granite", {"residual_multiplier": 0.0}, r"residual_multiplier must be positive, not 0\.0"),
        ("Granite", {"logits_scaling": "8"}, "logits_scaling must be a number, not '8'"),
        ("Llama", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ("Llama", {"num_key_value_heads": 3}, "multiple of key heads"),
        ("Llama", {"rope_theta": "x"}, "rope_theta must be a positive number"),
        ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
        ("Phi3", SHORT, "short_factor must be a list of 8 positive numbers"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be positive, not 0"),
        ("Qwen2", {"use_sliding_window": True, "layer_types": KINDS[:1]}, "layer_types has 1 entries for 2 layers"),
    ],
)
def test_damaged_configurations_name_the_field(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        of(family, {"Gemma3": GEMMA, "Qwen2": QWEN2}.get(family, LLAMA) | changes)


GGUF = json.loads("""{
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64, "llama.context_length": 256,
    "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3}""") | {"tokenizer.ggml.tokens": ["a"] * 100}


def test_gguf_metadata_gives_the_same_spec() -> None:
    found = detect("llama")
    assert found.spec_from_gguf(GGUF | {"llama.rope.freq_base": 500000.0}, ["output.weight"]) == LLAMA_SPEC
    spec = found.spec_from_gguf(GGUF, ["blk.0.attn_q.bias"])
    assert (spec.tied_head, spec.qkv_bias, spec.attn_out_bias, spec.mlp_bias) == (True, True, False, False)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert found.spec_from_gguf(GGUF | scaling).rope == RopeSpec(10_000.0, "linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"llama.block_count": 2**31}, CorruptModel, "llama.block_count 2147483648 is more than"),
        ({"llama.block_count": [1, 2]}, CorruptModel, "llama.block_count must be a whole number"),
        ({"llama.rope.scaling.type": "su"}, UnsupportedModel, "RoPE kind 'su' .*known: none, linear, yarn, longrope"),
        ({"llama.rope.scaling.type": "yarn"}, CorruptModel, r"llama\.rope\.scaling\.factor must be a positive number"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, UnsupportedModel, "yarn_log_multiplier is not supported"),
        ({"llama.attention.value_length": 8}, UnsupportedModel, "value_length"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "RoPE over 8 of 16 dimensions"),
        ({"tokenizer.ggml.tokens": []}, CorruptModel, "does not declare its vocabulary size"),
        ({"llama.attention.causal": False}, UnsupportedModel, r"llama\.attention\.causal False .* only True"),
        ({"llama.attn_logit_softcapping": 50.0}, UnsupportedModel, r"llama\.attn_logit_softcapping 50\.0 is not"),
        ({"llama.logit_scale": 0.5}, UnsupportedModel, r"llama\.logit_scale 0\.5 .* only 0\.0 or 1\.0"),
        ({"llama.rope.scaling.attn_factor": 2.0}, UnsupportedModel, r"attn_factor 2\.0 .* scaling 'none', only 1\.0"),
    ],
)
def test_gguf_metadata_is_checked(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detect("llama").spec_from_gguf(GGUF | changes, [])


def test_every_tensor_of_every_family_has_a_gguf_name() -> None:
    for family in load_families().families:
        if not family.gguf["architectures"] and family.name != "mistral":
            continue
        rope = {"rope_parameters": ROPE_OF_MINISTRAL} if family.name == "ministral3" else {}
        spec = family.spec_from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True} | rope)
        names = [family.gguf_name(name) for name in tensor_shapes(spec)]
        assert len(set(names)) == len(names)
        query = "blk.1.attn_qkv.weight" if spec.fused else "blk.1.attn_q.weight"
        norm = "blk.0.ffn_norm.weight" if spec.pre_norms else "blk.0.post_ffw_norm.weight"
        assert {"token_embd.weight", query, norm, "output_norm.weight"} <= set(names)


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
    spec = families.detect("OrionForCausalLM").spec_from_hf(LLAMA | {"n_blocks": 5})
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
        ("name = 'x'\nextends = 'llama'\nnorm = 'batch'", "norm 'batch' is unknown; choose from rms, layer"),
        ("name = 'x'\nextends = 'llama'\n[config.spec]\nn_layers = 'a'", "unknown fields: n_layers"),
    ],
)
def test_a_wrong_family_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_families([tmp_path])


def test_a_residual_scale_needs_norms_that_do_not_see_it(tmp_path: Path) -> None:
    text = "name = 'x'\nextends = 'olmo2'\n[config]\narchitectures = ['X']\n"
    text += "[config.spec]\nresidual_scale = {value = 0.5}"
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UnsupportedModel, match="residual_scale is not supported without norms before"):
        load_families([tmp_path]).detect("X").spec_from_hf(LLAMA | {"model_type": "olmo2"})


def test_specs_are_packaged_beside_the_module() -> None:
    assert {path.stem for path in SPEC_DIR.glob("*.toml")} == set(FAMILIES)


def test_token_ids_are_distinct_and_valid() -> None:
    assert token_ids([2, 2, None, -1, True, "x", 0]) == (2, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_specs_agree_with_transformers_models(tiny_hf_checkpoints: dict[str, Any], family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_hf_checkpoints[family]()
    config, expected = AutoConfig.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).state_dict()
    with closing(open_checkpoint(str(path))) as checkpoint:
        spec, ours = checkpoint.spec, state_dict_fp32(checkpoint)
    assert spec.head_dim == (24 if family in ("mistral", "ministral3", "qwen3", "gemma", "gemma2", "gemma3") else 16)
    tied = family in ("qwen2", "gemma", "gemma2", "gemma3", "mpt", "smollm3")
    assert (spec.sliding_window, spec.tied_head) == (8 if family in ("mistral", "gemma2", "gemma3") else None, tied)
    rope = getattr(config, "rope_parameters", {"rope_theta": spec.rope.theta})
    assert spec.rope.theta == (rope["full_attention"] if family == "gemma3" else rope)["rope_theta"]
    if family in ("gemma2", "gemma3"):
        kinds = ["sliding_attention" if spec.window(layer) else "full_attention" for layer in range(spec.num_layers)]
        assert kinds == config.layer_types
    ours = {spec.names.in_file(name): tensor for name, tensor in ours.items()}
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


# Through the whole engine.

Tiny = dict[str, Callable[..., Path]]


def test_longrope_past_the_original_context_is_refused_by_name(tiny_hf_checkpoints: Tiny) -> None:
    rope = LONGROPE | {"short_factor": [1.5] * 8, "rope_theta": 10000.0}
    directory = tiny_hf_checkpoints["phi3"](rope_parameters=rope, original_max_position_embeddings=64)
    short = engine_config(directory, kernels="torch", pool_bytes=8 << 20)
    long = replace(short, model=replace(short.model, max_model_len=65))
    with closing(open_checkpoint(str(directory))) as checkpoint:
        with pytest.raises(
            ConfigError, match=r"65 is more than the 64 .*its RoPE is served within the original context"
        ):
            build(checkpoint, long, None)
        assert build(checkpoint, short, None).parts.max_model_len == 64


def test_queries_of_ministral_are_not_scaled_by_position_within_its_context(tiny_hf_checkpoints: Tiny) -> None:
    """Behind it they are, which is not served."""
    directory = tiny_hf_checkpoints["ministral3"]()
    with closing(open_checkpoint(str(directory))) as checkpoint:
        assert checkpoint.spec.max_position == 64
        config = engine_config(directory, kernels="torch", pool_bytes=8 << 20)
        config = replace(config, model=replace(config.model, max_model_len=65))
        with pytest.raises(ConfigError, match="65 is more than the 64"):
            build(checkpoint, config, None)
    with pytest.raises(UnsupportedModel, match="'default' is not supported; known: yarn"):
        of("Ministral3", LLAMA)
    meta = {key.replace("llama.", "mistral3."): value for key, value in GGUF.items()}
    meta |= {"general.architecture": "mistral3", "mistral3.attention.temperature_scale": 0.1}
    with pytest.raises(
        UnsupportedModel, match="temperature_scale with RoPE scaling 'none' is not supported, only yarn"
    ):
        detect("mistral3").spec_from_gguf(meta)


def test_a_tokenizer_is_refused_before_weights_are_loaded(
    tiny_hf_checkpoints: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny_hf_checkpoints["gemma3"](), tmp_path / "m.gguf", "F32")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"spm!"))
    monkeypatch.delattr("lorasrv.engine.loaded_model.load_weights")
    message = r"tokenizer model 'spm!' is not supported; known: gpt2 .*Hugging Face"
    with closing(open_checkpoint(str(path))) as checkpoint, pytest.raises(UnsupportedModel, match=message):
        build(checkpoint, engine_config(path, kernels="torch"), None)
