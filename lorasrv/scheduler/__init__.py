"""Decide how many tokens each request computes in the next step, and which one is preempted. Torch-free."""
