"""A base of which there is only the shape, and adapters that fit it, for what reads no more of a base."""

from pathlib import Path

from tiny_adapter import tiny_adapter
from tiny_llama import CONFIG

TINY_LLAMA = CONFIG | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def write_adapter(folder: Path, layers: int, n_in: int, n_out: int) -> Path:
    """Write an adapter of every q projection of a base of this shape, which it does not name."""
    q = "self_attn.q_proj"
    return tiny_adapter(folder, layers=layers, shapes={q: (n_in, n_out)}, modules=(q,), base_model_name_or_path=None)
