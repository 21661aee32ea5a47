"""Propose draft tokens, which a step verifies. Torch-free."""
