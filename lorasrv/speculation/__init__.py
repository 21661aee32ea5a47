"""Propose draft tokens, which a step verifies, and learn what proposals are worth. Torch-free."""
