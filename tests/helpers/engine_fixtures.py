"""Tiny models and adapters as fixtures, for tests elsewhere: import them by name."""

from tiny_checkpoints import (  # noqa: F401
    VOCAB,
    adapter_dirs,
    corpus,
    model,
    tiny_hf_checkpoints,
    tiny_tokenizer_file,
)
