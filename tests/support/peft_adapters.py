"""PEFT's own adapters for the tiny checkpoints."""

from pathlib import Path
from typing import Any

import torch


def peft_adapter(model: Path, folder: Path, *, seed: int = 0, strength: float = 1.0, **lora: Any) -> torch.nn.Module:
    """Write an adapter of a Hugging Face folder as PEFT saves it; returns PEFT's model, to ask for logits.

    A and B are random; `strength` multiplies B. `lora`: fields of LoraConfig; rank 4 on all linears without any.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    fields = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"} | lora
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(seed)
    adapted = get_peft_model(base, LoraConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(strength)
    adapted.save_pretrained(folder)
    return adapted
