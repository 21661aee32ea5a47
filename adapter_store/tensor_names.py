"""Which module of the base a tensor belongs to, by its name; and for a foreign name, what it looks like."""

from dataclasses import dataclass

from adapter_store.errors import ProblemList, show
from adapter_store.manifest import MLX_WAY_OUT
from adapter_store.spec import BaseShapes

WRAPPER = "base_model.model."
_SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_UNWRAP = "the model was saved inside a wrapper; unwrap it and call save_pretrained() again"
_FULL_COPY = "full weights beside the LoRA; train again without modules_to_save, and with save_embedding_layers=False"

# (part of the name, code, what it is and the way out), the first that fits; §B2 and §B4 of the format notes.
_KNOWN_FORMS = (
    ("lora_magnitude_vector", "unsupported_use_dora", "DoRA's magnitude; merge the adapter or train plain LoRA"),
    ("trainable_tokens", "unsupported_trainable_token_indices", "trained embedding rows; merge or train without them"),
    ("lora_embedding_", "unsupported_embedding", "LoRA of an embedding; train again without embed_tokens and lm_head"),
    (".lora_B.bias", "unsupported_lora_bias", "a bias beside lora_B; merge or train with lora_bias=false"),
    ("lora_up.", "not_a_language_model", "an image model's adapter (lora_up, lora_down)"),
    ("lora_down.", "not_a_language_model", "an image model's adapter (lora_up, lora_down)"),
    ("_orig_mod.", "wrapped_names", f"torch.compile's name: {_UNWRAP}"),
    ("_fsdp_wrapped_module.", "wrapped_names", f"FSDP's name: {_UNWRAP}"),
    ("language_model.", "wrapped_names", "a module of a multimodal model's language part, not of this base"),
    (".experts.", "unsupported_experts", "LoRA of an expert, which this base does not have"),
    ("lm_head.lora_", "unsupported_embedding", "LoRA of the head; train again without embed_tokens and lm_head"),
    ("lm_head.", "unsupported_modules_to_save", _FULL_COPY),
    ("embed_tokens.", "unsupported_modules_to_save", _FULL_COPY),
    ("norm.weight", "unsupported_modules_to_save", _FULL_COPY),
)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Which half (A or B) of which module of which layer."""

    layer: int
    module: str
    half: str


def locate(name: str, base: BaseShapes, problems: ProblemList) -> TensorPlace | None:
    """Where a tensor of PEFT's saved form belongs; None, and a problem, if it is no linear module of this base."""
    prefix = WRAPPER + base.layer_prefix
    layer_text, dot, rest = name.removeprefix(prefix).partition(".")
    suffix = next((s for s in _SUFFIXES if rest.endswith(s)), "")
    module = rest.removesuffix(suffix) if suffix else ""
    layer = _layer_number(layer_text)
    if not name.startswith(prefix) or not dot or not suffix or layer is None or module not in base.modules:
        _describe(name, base, problems)
        return None
    if layer >= base.num_layers:
        message = f"layer {layer} of {base.num_layers}: this base has layers 0 to {base.num_layers - 1}"
        problems.add("layer_out_of_range", name, f"{message}; the adapter was trained on a deeper base")
        return None
    return TensorPlace(layer, module, _SUFFIXES[suffix])


def module_name(base: BaseShapes, layer: int, module: str) -> str:
    """A module's full name in the base, as PEFT's patterns see it."""
    return f"{base.layer_prefix}{layer}.{module}"


def _layer_number(text: str) -> int | None:
    """A decimal without leading zeros, so that one module has one name."""
    if not text.isascii() or not text.isdigit() or len(text) > 6 or (len(text) > 1 and text[0] == "0"):
        return None
    return int(text)


def _describe(name: str, base: BaseShapes, problems: ProblemList) -> None:
    code, what = _recognise(name)
    expected = f"{WRAPPER}{base.layer_prefix}N.M.lora_A.weight or lora_B, N below {base.num_layers}"
    message = f"is {what}. Expected {expected}, M one of {', '.join(base.modules)}"
    problems.add(code, show(name)[1:-1], message)


def _recognise(name: str) -> tuple[str, str]:
    if name.endswith((".lora_a", ".lora_b")):
        return "mlx_adapter", f"MLX's name; {MLX_WAY_OUT}"
    if name.startswith("module."):
        return "wrapped_names", f"DataParallel's name: {_UNWRAP}"
    for part, code, what in _KNOWN_FORMS:
        if part in name:
            return code, what
    if _has_adapter_name(name):
        return (
            "adapter_name_in_tensor",
            "in the in-memory form, with the adapter's name; call save_pretrained() instead",
        )
    if ".lora_" in name and not name.startswith(WRAPPER):
        return "missing_prefix", f"without the prefix {WRAPPER}; save the PEFT model, not the base inside it"
    return "unknown_tensor", "no linear module of this base's decoder layers; it was made for another architecture"


def _has_adapter_name(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 3 and parts[-3] in ("lora_A", "lora_B") and parts[-1] == "weight"
