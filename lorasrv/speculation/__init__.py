"""Propose draft tokens, which a step verifies, and learn how much proposals gain. Torch-free."""
