"""Drafters: they propose the next tokens of an answer, which a step verifies. Torch-free."""
