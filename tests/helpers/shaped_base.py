"""A base of which there is only the shape, and adapters that fit it, for what reads no more of a base."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def write_adapter(folder: Path, layers: int, n_in: int, n_out: int) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = random.standard_normal((2, n_in)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = random.standard_normal((n_out, 2)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
