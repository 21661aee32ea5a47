"""The engine: one quantized base model and many LoRA adapters in one batch."""

__version__ = "0.1.0"
