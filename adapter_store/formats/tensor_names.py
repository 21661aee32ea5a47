"""Mapping of tensor names to modules of the base; for an unknown name, the problem says what it looks like.

If a name differs from PEFT's saved form only by parts that a wrapper added, these are removed and reported.
"""

from dataclasses import dataclass

from adapter_store.errors import ProblemList, show
from adapter_store.formats.adapter_config import MLX_REMEDY
from adapter_store.spec import BaseShapes

WRAPPER = "base_model.model."
A, B, MAGNITUDE, B_BIAS, BASE_BIAS, BIAS, WEIGHT = "A", "B", "magnitude", "B bias", "base bias", "bias", "weight"
FROZEN, TOKEN_ROWS, SECOND_COPY = "base weight", "trained rows", "second copy"
"""Parts of the embedding and of the head: a saved copy of the base's own weight, rows of some tokens, and a second
WEIGHT that PEFT does not read."""
_LORA_EXTRAS = {
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_B.bias": B_BIAS,
}
_SUFFIXES = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    **_LORA_EXTRAS,
    ".base_layer.bias": BASE_BIAS,
    ".bias": BIAS,
    ".weight": WEIGHT,
}
"""The part of a module that a tensor is, by the end of its name; the first match applies."""
TRAINING_ONLY = (".lora_velora_embed", ".lora_monteclora_sampler.")
"""Parts of the names of tensors that PEFT reads for training only."""
_MATRICES = (".lora_A.weight", ".lora_B.weight")
EMBEDDING_MATRICES = (".lora_embedding_A", ".lora_embedding_B")
_END_SUFFIXES = {
    **_LORA_EXTRAS,
    ".base_layer.weight": FROZEN,
    ".original_module.weight": FROZEN,
    ".token_adapter.base_layer.weight": FROZEN,
    ".token_adapter.trainable_tokens_delta": TOKEN_ROWS,
    ".modules_to_save.weight": SECOND_COPY,
    ".weight": WEIGHT,
}
"""The part of the embedding or of the head that a tensor is, beside A and B, by the end of its name."""
FULL_COPY = (
    "a full copy of a linear's weights, and only norms, head and embedding are served so; merge the adapter into the "
    "base (peft: merge_and_unload) and serve that, or train again without it in modules_to_save"
)
_COPIES = (".modules_to_save", ".original_module", ".base_layer")
"""Name parts that may stand between a module's name and its full weight."""
_EMBEDDING = "not LoRA of the embedding as PEFT saves it; train again without embed_tokens"
_IMAGES = "an image model's adapter"
_MULTIMODAL = (
    "LoRA of a vision or audio part, which this base does not have; train the language layers only "
    "(Unsloth: finetune_vision_layers=False)"
)
_TRAINER = "the trainer's own name; convert the adapter to PEFT's form with the trainer's exporter to Hugging Face"
WRAPPER_PARTS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "module": "DataParallel",
    "language_model": "the language part of a multimodal model",
}
"""Name parts that are not modules of a base, with the wrapper that adds each."""
MAX_NAME_CHARS = 1024
_NAMED = ("lora_A", "lora_B", "lora_magnitude_vector")
_PUT_AFTER_PEFT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# (part of the name, code, what it is and the remedy); the first match applies.
KNOWN_FORMS = (
    (
        2 * WRAPPER,
        "wrapped_twice",
        "of a model that PEFT wrapped twice, in which PEFT would not find it; call get_peft_model once, on the base",
    ),
    (
        "trainable_tokens",
        "unsupported_trainable_token_indices",
        "rows of a module that is no table of this base's tokens",
    ),
    ("lora_embedding_", "unsupported_embedding", _EMBEDDING),
    ("lora_up.", "not_a_language_model", f"{_IMAGES} (lora_up, lora_down)"),
    ("lora_down.", "not_a_language_model", f"{_IMAGES} (lora_up, lora_down)"),
    ("lora_unet", "not_a_language_model", _IMAGES),
    ("unet.", "not_a_language_model", _IMAGES),
    ("transformer_blocks.", "not_a_language_model", _IMAGES),
    ("vision_", "unsupported_vision", _MULTIMODAL),
    ("visual.", "unsupported_vision", _MULTIMODAL),
    ("multi_modal_projector.", "unsupported_vision", _MULTIMODAL),
    ("audio_tower.", "unsupported_vision", _MULTIMODAL),
    (".experts.", "unsupported_experts", "LoRA of an expert, which this base does not have"),
    (".attention.wq.", "trainer_names", _TRAINER),
    (".attention.wk.", "trainer_names", _TRAINER),
    (".attention.wv.", "trainer_names", _TRAINER),
    (".attention.wo.", "trainer_names", _TRAINER),
    (".feed_forward.w", "trainer_names", _TRAINER),
    (".lora_a.weight", "trainer_names", _TRAINER),
    (".lora_b.weight", "trainer_names", _TRAINER),
    ("embed_tokens.lora_", "unsupported_embedding", _EMBEDDING),
    ("lm_head.lora_", "unsupported_embedding", "not LoRA of the head as PEFT saves it; train again without lm_head"),
    ("lm_head.", "unsupported_modules_to_save", "no weight of the head as PEFT saves it; save the adapter again"),
    ("embed_tokens.", "unsupported_modules_to_save", "no weight of the embedding as PEFT saves it; save it again"),
)


@dataclass(frozen=True, slots=True)
class PlainName:
    """Hold a tensor's name in PEFT's saved form.

    `adapter_name` stood before `.weight`, as in a state dict in memory. `notices` say what was changed.
    `saved_module` is the module's name with wrappers, as PEFT may have seen it in training: patterns written for it
    may not match the plain name.
    """

    text: str
    adapter_name: str = ""
    notices: tuple[str, ...] = ()
    saved_module: str = ""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Name the layer, the module and the part of it that a tensor is, and the name that this was read from."""

    layer: int
    module: str
    part: str
    name: PlainName


def plain_name(name: str, base: BaseShapes) -> PlainName:
    """Return a name without the parts that wrappers and in-memory state dicts add."""
    if len(name) > MAX_NAME_CHARS:
        return PlainName(name)
    parts = name.split(".")
    is_wrapped = not WRAPPER_PARTS.keys().isdisjoint(parts)
    if not is_wrapped and name.startswith(WRAPPER + base.layer_prefix) and name.endswith(_MATRICES):
        return PlainName(name)
    notices = [f"names had {p}. removed ({what})" for p, what in WRAPPER_PARTS.items() if p in parts]
    kept = [part for part in parts if part not in WRAPPER_PARTS]
    adapter_name = ""
    if len(kept) > 3 and kept[-3] in _NAMED and kept[-1] in ("weight", "bias"):
        adapter_name = kept.pop(-2)
        notices.append(f"names had the adapter's own name {show(adapter_name)} removed (a state dict as in memory)")
    text = ".".join(kept)
    outside = (*base.ends, *([base.final_norm] if base.final_norm else []))
    own = (base.layer_prefix, *(f"{module}." for module in outside))
    if text.startswith(own) and text.endswith((*_SUFFIXES, *EMBEDDING_MATRICES, *_END_SUFFIXES)):
        text = WRAPPER + text
        notices.append(f"names had no {WRAPPER}, which was put before them")
    seen = ".".join(part for part in parts if part not in _PUT_AFTER_PEFT)
    saved = seen.partition(WRAPPER)[2] or seen
    module, lora, _ = saved.rpartition(".lora_")
    return PlainName(text, adapter_name, tuple(notices), module if lora else "")


def locate(name: str, base: BaseShapes, problems: ProblemList) -> TensorPlace | None:
    """Return a tensor's place; record a problem and return None if it belongs to no linear or norm of this base."""
    prefix = WRAPPER + base.layer_prefix
    plain = plain_name(name, base)
    if base.final_norm and plain.text == f"{WRAPPER}{base.final_norm}.weight":
        return TensorPlace(base.num_layers - 1, base.final_norm, WEIGHT, plain)
    end, part = _end_of(plain.text, base)
    if end:
        return TensorPlace(base.num_layers, end, part, plain)
    layer_text, dot, rest = plain.text.removeprefix(prefix).partition(".")
    suffix = next((s for s in _SUFFIXES if rest.endswith(s)), "")
    module, part = rest.removesuffix(suffix), _SUFFIXES.get(suffix, "")
    layer = _layer_number(layer_text)
    is_known = module in base.norms if part == WEIGHT else part and module in base.modules
    if not plain.text.startswith(prefix) or not dot or layer is None or not is_known:
        code, what = ("unsupported_modules_to_save", FULL_COPY) if _is_full_copy(rest, base) else _recognise(name)
        expected = f"{prefix}N.M.lora_A.weight or lora_B, N below {base.num_layers}"
        message = f"is {what}. Expected {expected}, M one of {', '.join(base.modules)}"
        problems.add(code, show(name)[1:-1], message)
        return None
    if layer >= base.num_layers:
        message = f"layer {layer} of {base.num_layers}: this base has layers 0 to {base.num_layers - 1}"
        problems.add("layer_out_of_range", show(name)[1:-1], f"{message}; the adapter was trained on a deeper base")
        return None
    if (layer, module) in base.lacking:
        problems.add(
            "unknown_tensor", show(name)[1:-1], f"is for {module} of layer {layer}, which this base does not have"
        )
        return None
    return TensorPlace(layer, module, part, plain)


def module_name(base: BaseShapes, layer: int, module: str) -> str:
    """Return a module's full name in the base, as PEFT's patterns see it."""
    if module == base.final_norm or module in base.ends:
        return module
    return f"{base.layer_prefix}{layer}.{module}"


def _end_of(text: str, base: BaseShapes) -> tuple[str, str]:
    """Return the module outside the layers that a tensor belongs to, and its part of it; "" if there is none."""
    for end in base.ends:
        matrices = EMBEDDING_MATRICES if end == base.embedding else _MATRICES
        suffixes = dict(zip(matrices, (A, B), strict=True)) | _END_SUFFIXES
        if text.startswith(WRAPPER + end) and (part := suffixes.get(text.removeprefix(WRAPPER + end))):
            return end, part
    return "", ""


def _layer_number(text: str) -> int | None:
    """Parse a decimal without leading zeros, so that each module has exactly one name."""
    if not text.isascii() or not text.isdigit() or len(text) > 6 or (len(text) > 1 and text[0] == "0"):
        return None
    return int(text)


def _is_full_copy(rest: str, base: BaseShapes) -> bool:
    """Return whether a name, from the layer on, is that of a linear's full weight."""
    module = rest.removesuffix(".weight")
    for copy in _COPIES:
        module = module.partition(copy)[0]
    return module != rest and module in base.modules


def _recognise(name: str) -> tuple[str, str]:
    if name.endswith((".lora_a", ".lora_b")):
        return "mlx_adapter", f"MLX's name; {MLX_REMEDY}"
    for part, code, what in KNOWN_FORMS:
        if part in name:
            return code, what
    return "unknown_tensor", "not a linear module of this base's decoder layers; it was made for another architecture"
