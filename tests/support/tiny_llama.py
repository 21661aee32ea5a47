"""The smallest model that the engine serves, and adapters of its q projections, as bytes, for tests of the store."""

import json
from pathlib import Path

from safetensors_bytes import tiled, with_header

HIDDEN, LAYERS = 64, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_config(folder: Path) -> None:
    """Write a model's folder without weights, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def adapter(rank: int, matrix: bytes) -> tuple[dict[str, object], bytes]:
    """Return adapter_config.json and adapter_model.safetensors; A and B have these `rank * HIDDEN` float32 values."""
    stem, sides = "base_model.model.model.layers", {"A": (rank, HIDDEN), "B": (HIDDEN, rank)}
    names = {f"{stem}.{n}.self_attn.q_proj.lora_{side}.weight": s for n in range(LAYERS) for side, s in sides.items()}
    config: dict[str, object] = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    return config, with_header(tiled(names), matrix * len(names))
