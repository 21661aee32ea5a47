"""Tiny multimodal checkpoints, and adapters that PEFT saves for them."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import COMMON, ROPE_OF_MINISTRAL, TOKENIZER_CONFIG, tiny_tokenizer_json

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA = {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 3, "head_dim": 24, "pad_token_id": 0}
WHOLE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration", GEMMA, {"mm_tokens_per_image": 4}),
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": 8, "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
    ),
    "ministral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "rope_parameters": ROPE_OF_MINISTRAL, "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
    ),
}
"""By language part: classes of transformers, the language part's settings beside the common ones, and the whole's."""
LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Linears of the language part."""


def write_multimodal(folder: Path, kind: str, *, as_modules: bool = False) -> Path:
    """Write a checkpoint with a vision tower, and the tokenizer; tensors have the names of published ones, or those of
    the modules of transformers.
    """
    import transformers

    config, model, text, whole = WHOLE[kind]
    vision = VISION | ({"model_type": "pixtral"} if kind != "gemma3" else {})
    torch.manual_seed(3)
    made = getattr(transformers, model)(
        getattr(transformers, config)(text_config={**COMMON, **text}, vision_config=vision, **whole)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if kind == "gemma3" else 0.0)
    made.save_pretrained(folder, save_original_format=not as_modules)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return folder


def multimodal_adapter(directory: Path, out: Path, target_modules: Any) -> torch.nn.Module:
    """Write an adapter as PEFT saves it for the whole model, and return PEFT's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=target_modules, init_lora_weights=False)
    adapted: torch.nn.Module = get_peft_model(base, config).eval()
    adapted.save_pretrained(out)  # type: ignore[operator]
    return adapted
