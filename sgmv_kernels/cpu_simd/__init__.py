"""LLVM vector intrinsics used by the kernels."""
