"""Triton backend: kernels, launch metadata, CUDA-graph plans and block sizes."""
