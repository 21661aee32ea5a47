"""Kernels for batches whose rows belong to different LoRA adapters. Callers use them through `sgmv_kernels.ops`.

Plans and other types of the ops are in `backend`, formats of weights and pages in `formats`.
"""
