"""Convert a `ModelSpec` to a transformers configuration, for bases that are not Hugging Face directories."""

from collections.abc import Collection, Mapping
from typing import Any

import transformers

from lorasrv.models.spec import ModelSpec, RopeSpec
from lorasrv.offline.verify.job import CannotVerify

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "ministral3": "Ministral3Config",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "smollm3": "SmolLM3Config",
    "granite": "GraniteConfig",
    "olmo2": "Olmo2Config",
}
_NONE, _ATTENTION, _QKV, _MLP, _ALL = (
    (False, False, False),
    (True, True, False),
    (True, False, False),
    (False, False, True),
    (True, True, True),
)
_BIASES: Mapping[str, Collection[tuple[bool, bool, bool]]] = {
    "llama": (_NONE, _ATTENTION, _MLP, _ALL),
    "mistral": (_NONE,),
    "ministral3": (_NONE,),
    "qwen2": (_QKV,),
    "qwen3": (_NONE, _ATTENTION),
    "gemma": (_NONE, _ATTENTION),
    "gemma2": (_NONE, _ATTENTION),
    "gemma3": (_NONE, _ATTENTION),
    "phi3": (_NONE,),
    "smollm3": (_NONE, _ATTENTION, _MLP, _ALL),
    "granite": (_NONE, _ATTENTION, _MLP, _ALL),
    "olmo2": (_NONE, _ATTENTION),
}
"""Allowed combinations per family: bias on q, k and v; on o; on the MLP."""
SLIDING, FULL = "sliding_attention", "full_attention"


def config_from_spec(spec: ModelSpec) -> Any:
    """Return the configuration from which transformers builds the same model.

    Raises:
        CannotVerify: transformers has no such model.
    """
    family = _family(spec)
    fields: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
        "rope_parameters": _rope_parameters(spec),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **_of_family(spec, family),
    }
    return getattr(transformers, _CLASSES[family])(**fields)


def _family(spec: ModelSpec) -> str:
    """Return the family name that transformers uses; a GGUF file of mistral calls itself llama, or ministral3."""
    if spec.family not in _CLASSES:
        raise CannotVerify(f"no model of transformers is known for family {spec.family}; known: {', '.join(_CLASSES)}")
    is_mistral = spec.sliding_window if spec.family == "llama" else not spec.rope.max_position
    return "mistral" if spec.family in ("llama", "ministral3") and is_mistral else spec.family


def _of_family(spec: ModelSpec, family: str) -> dict[str, Any]:
    biases = (spec.qkv_bias, spec.attn_out_bias, spec.mlp_bias)
    if biases not in _BIASES[family]:
        raise CannotVerify(
            f"transformers has no {family} model with biases on just these linears (qkv, o, MLP): {biases}"
        )
    activation = _ACTIVATIONS[spec.activation]
    if family in ("gemma2", "gemma3"):
        scalar = spec.query_scalar or spec.head_dim
        return {
            "hidden_activation": activation,
            "attention_bias": spec.qkv_bias,
            "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
            "attn_logit_softcapping": spec.attn_softcap,
            "final_logit_softcapping": spec.final_softcap,
            "sliding_window": spec.sliding_window or spec.max_position,
            "layer_types": _layer_types(spec),
        }
    fields: dict[str, Any] = {"hidden_act": activation}
    if family in ("llama", "smollm3", "granite"):
        fields |= {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    if family == "granite":
        fields |= {
            "attention_multiplier": spec.attention_scale,
            "embedding_multiplier": spec.embedding_scale,
            "residual_multiplier": spec.residual_scale,
            "logits_scaling": spec.logit_divisor,
        }
    if family == "smollm3":
        fields["no_rope_layers"] = [int(spec.rope_of(layer) is not None) for layer in range(spec.num_layers)]
    if family in ("mistral", "ministral3", "phi3"):
        if spec.windowed_layers and not all(spec.windowed_layers):
            raise CannotVerify(f"transformers has no {family} model with a window on some layers only")
        fields["sliding_window"] = spec.sliding_window
    if family in ("qwen2", "qwen3"):
        fields |= {
            "use_sliding_window": spec.sliding_window is not None,
            "sliding_window": spec.sliding_window,
            "layer_types": _layer_types(spec),
        }
    if family in ("qwen3", "gemma", "olmo2"):
        fields["attention_bias"] = spec.qkv_bias
    if family == "phi3":
        fields["original_max_position_embeddings"] = spec.max_position
    return fields


def _layer_types(spec: ModelSpec) -> list[str]:
    return [SLIDING if spec.window(layer) else FULL for layer in range(spec.num_layers)]


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    whole = _rope(spec.rope, spec)
    if spec.family == "gemma3":
        return {FULL: whole, SLIDING: _rope(spec.rope_local or spec.rope, spec)}
    return whole


def _rope(rope: RopeSpec, spec: ModelSpec) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.dims:
        params["partial_rotary_factor"] = rope.dims / spec.head_dim
    if rope.kind in ("linear", "llama3", "yarn"):
        params["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        params["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        params |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        params |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    if spec.family == "ministral3" and rope.max_position:
        # Any number: within that context it changes nothing.
        params["llama_4_scaling_beta"] = 0.1
    if rope.kind == "factors":
        # Each frequency has its own divisor, whatever the checkpoint's rule: LongRoPE within its context.
        params |= {
            "rope_type": "longrope",
            "short_factor": list(rope.factors),
            "long_factor": list(rope.factors),
            "attention_factor": rope.attention_factor,
            "original_max_position_embeddings": spec.max_position,
            "factor": 1.0,
        }
    return params
