"""Rotation of heads by Hadamard matrices on the CPU, for the kernels that write and read pages of codes."""

import numpy as np

from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import scaled
from sgmv_kernels.cpu_simd.kv_codes import mix_lanes, mix_vectors
from sgmv_kernels.cpu_simd.memory_access import f32, put_f32
from sgmv_kernels.cpu_simd.vector_ir import LANES
from sgmv_kernels.formats.kv_format import CODES_STEP


@kernel_part
def code_dim(dim):  # type: ignore[no-untyped-def]
    """Return the numbers of a head in codes; see `kv_format.padded_dim`."""
    return (dim + CODES_STEP - 1) // CODES_STEP * CODES_STEP


@kernel_part
def pair_dim(dim):  # type: ignore[no-untyped-def]
    """Return the bytes of a head in 4-bit codes; see `kv_format.padded_pairs`."""
    return (dim + 2 * CODES_STEP - 1) // (2 * CODES_STEP) * CODES_STEP


@kernel_part
def rotate(x, n, dim):  # type: ignore[no-untyped-def]
    """Rotate n numbers, a head of `dim` padded with zeros, in blocks of the largest power of two that divides `dim`."""
    block, half = dim & -dim, np.int64(1)
    if n % LANES == 0:
        mix_lanes(x, n, block)
        half = np.int64(LANES)
    while half < block:
        if half >= LANES and n % LANES == 0:
            mix_vectors(x, n, half)
        else:
            for at in range(n // 2):
                first = at + at // half * half
                left, right = f32(x, first), f32(x, first + half)
                put_f32(x, first, left + right)
                put_f32(x, first + half, left - right)
        half *= 2
    scaled(x, n, np.float32(1) / np.sqrt(np.float32(block)), x)
