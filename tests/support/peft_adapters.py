"""PEFT's own adapters for the tiny checkpoints."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def gptq_layers() -> Iterator[None]:
    """Let PEFT put its LoRA layer of GPTQ linears around float linears, too: the forward pass of QALoRA is there."""
    from peft.tuners.lora import model
    from peft.tuners.lora.gptq import GPTQLoraLinear

    def dispatched(target: Any, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        return GPTQLoraLinear(target, adapter_name, config=config, **kwargs)

    own, model.dispatch_gptq = model.dispatch_gptq, dispatched
    try:
        yield
    finally:
        model.dispatch_gptq = own


def peft_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int = 0,
    strength: float = 1.0,
    save_embedding_layers: bool | str = "auto",
    added: Sequence[str] = (),
    special: Sequence[str] = (),
    spare: int | None = None,
    **lora: Any,
) -> torch.nn.Module:
    """Write an adapter of a Hugging Face folder as PEFT saves it; return PEFT's model, for its logits.

    A and B are random; `strength` multiplies B. `lora`: fields of LoraConfig; without any, rank 4 on all linears. With
    `added` or `special` tokens, or with `spare`, the model is resized to as many rows as the tokenizer has tokens, and
    `spare` more, and the tokenizer is saved as well. The rows of added tokens make them likely.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"} | lora
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    if added or special or spare is not None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens([*added])
        tokenizer.add_tokens([*special], special_tokens=True)
        tokenizer.save_pretrained(folder)
        known = base.config.vocab_size
        base.resize_token_embeddings(len(tokenizer) + (spare or 0), mean_resizing=False)
        with torch.no_grad():
            for end in {base.get_input_embeddings().weight, base.get_output_embeddings().weight}:
                end[known:] = 1.5 * end[seed + 10 : seed + 10 + max(0, len(end) - known)]
    with warnings.catch_warnings():
        # Warnings: biases cannot be merged or are not matrices; a tied head may have its own LoRA; ends are saved.
        told = "lora_bias=True|bias='|invalid shape|ensure_weight_tying|save_embedding_layers"
        warnings.filterwarnings("ignore", message=f".*({told})")
        torch.manual_seed(seed)
        adapted = get_peft_model(base, LoraConfig(**fields)).eval()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(strength)
                extras = "magnitude", "modules_to_save", "trainable_tokens_delta"
                is_extra = any(extra in name for extra in extras) or name.endswith("bias")
                if is_extra and parameter.requires_grad:
                    # As if trained: initial values would change nothing.
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.05 * torch.randn_like(parameter))
        adapted.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    module: torch.nn.Module = adapted
    return module
