"""Kernels for batches whose rows belong to different LoRA adapters. Computing goes through `sgmv_kernels.ops`.

Plans and other types of the ops are in `backend`, forms of weights and pages in `formats`.
"""
