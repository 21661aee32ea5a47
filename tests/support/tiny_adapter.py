"""PEFT adapters of a few hundred bytes, and the shape of the base that they fit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from adapter_store.spec import BaseShapes

BASE = "tiny-base"
HIDDEN, FFN, LAYERS = 8, 16, 2
SHAPES = BaseShapes(
    family="llama",
    num_layers=LAYERS,
    modules={"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, 4), "mlp.down_proj": (FFN, HIDDEN)},
    name=BASE,
)


def tiny_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 2,
    layers: int = LAYERS,
    shapes: Mapping[str, tuple[int, int]] = SHAPES.modules,
    modules: Sequence[str] = ("self_attn.q_proj", "self_attn.v_proj"),
    **config: Any,
) -> Path:
    """Write a PEFT folder with random weights that fits the base; another `seed` gives another content."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for module in modules:
            n_in, n_out = shapes[module]
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = random.standard_normal((rank, n_in)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.standard_normal((n_out, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [module.rpartition(".")[2] for module in modules],
        "base_model_name_or_path": BASE,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
