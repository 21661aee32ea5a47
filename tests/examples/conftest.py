"""Fixtures of the tiny llama."""

from tiny_checkpoints import adapter_dirs, model, tiny_hf_checkpoints  # noqa: F401
