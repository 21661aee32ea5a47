"""A base that has only a shape, and adapters that fit it, for code that needs only the shape."""

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
    """Write an adapter of every q projection of a base of this shape; its config does not name the base."""
    q = "self_attn.q_proj"
    return tiny_adapter(folder, layers=layers, shapes={q: (n_in, n_out)}, modules=(q,), base_model_name_or_path=None)
