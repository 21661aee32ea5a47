"""LLVM vector intrinsics that the kernels use."""
