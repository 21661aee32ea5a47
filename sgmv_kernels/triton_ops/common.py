"""Common helpers of the Triton kernels: differences of the interpreter, the dtype of products, one upload per step.

Under `TRITON_INTERPRET=1` (read when a kernel module is imported), kernels run on CPU tensors, program after program.
The interpreter is slow, and replaces a GPU in tests. Two of its bugs are worked around here, both seen with triton 3.6:
bf16 arithmetic is silently wrong, so operands are fp32; and `range` over a loaded number fails with NumPy 2.4.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.metadata.segments import Int32

INTERPRETED = bool(triton.knobs.runtime.interpret)
MOST_REGISTERS = 255
"""All registers of a thread. Without this limit, ptxas may spill to fit one more block (10 to 30 values on sm89)."""
_KEEP = tl.constexpr("mov.b32 $0, $1;")
ALIGNMENT_INTS = 16
"""Sections of a packed buffer begin at multiples of this, so that they are 64-byte aligned."""


def kernel(*unspecialized: str, unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Apply `triton.jit` with types. Triton does not compile new kernels for other values of `unspecialized` numbers,
    which change from step to step, nor for the alignment of `unaligned` tensors, which are parts of a step's upload."""
    made: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=list(unspecialized), do_not_specialize_on_alignment=list(unaligned)
    )
    return made


def _bound_interpreted(n: Any) -> int:
    return int(n.handle.data.item())


@kernel()
def _bound_compiled(n):  # type: ignore[no-untyped-def]
    return n


as_bound: Callable[[Any], Any] = _bound_interpreted if INTERPRETED else _bound_compiled
"""Function that turns a loaded number into the bound of a `range`, which the compiler pipelines, unlike a `while`."""


def _cast_interpreted(x: Any, dtype: Any) -> Any:
    if dtype != tl.bfloat16:
        return x.to(dtype)
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    nearest = tl.where(x != x, 0x7FC0, nearest)
    return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@kernel()
def _cast_compiled(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(dtype)


cast: Callable[[Any, Any], Any] = _cast_interpreted if INTERPRETED else _cast_compiled
"""Function that rounds fp32 to a stored dtype, to nearest even; the interpreter's own cast truncates bf16."""


def _dot_interpreted(a: Any, b: Any, total: Any, precision: str) -> Any:
    return total + tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)


@kernel()
def _dot_compiled(a, b, total, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(a, b, total, input_precision=precision)


dot: Callable[[Any, Any, Any, str], Any] = _dot_interpreted if INTERPRETED else _dot_compiled
"""total + a b. The interpreter uses BLAS, whose last bit depends on the row's position in a tile, unlike a tensor
core's. Products in fp64, rounded to fp32, do not show this."""


def _finished_interpreted(total: Any) -> Any:
    return total


@kernel()
def _finished_compiled(total):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(_KEEP, "=r,r", [total], tl.float32, is_pure=True, pack=1)


finished: Callable[[Any], Any] = _finished_interpreted if INTERPRETED else _finished_compiled
"""Function that waits for the products of a sum, without an instruction of its own.

Triton 3.6 does not wait for the last product of a loop iteration, and the next iteration overwrites the registers that
the product reads: seen on an H200, in about 1 of 500 launches.
"""


@kernel()
def is_finite(x):  # type: ignore[no-untyped-def]
    return tl.abs(x.to(tl.float32)) < float("inf")


@kernel()
def finite(x):  # type: ignore[no-untyped-def]
    """Return x with 0 in place of NaN and infinite numbers."""
    return tl.where(is_finite(x), x, 0.0)


@kernel()
def softened(x, cap):  # type: ignore[no-untyped-def]
    """Return cap * tanh(x / cap), fp32: a series near 0, else an exponential whose argument is never positive."""
    z = x / cap
    square = z * z
    near = z * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    small = tl.exp(-2.0 * tl.abs(z))
    size = (1.0 - small) / (1.0 + small)
    far = tl.where(z < 0.0, -size, size)
    return cap * tl.where(tl.abs(z) < 0.1, near, far)


def product_dtype(*dtypes: torch.dtype) -> tuple[Any, str]:
    """Return (operand dtype, input precision) of a `tl.dot`, from the stored dtypes of its operands.

    Half-precision operands of equal dtype are multiplied unchanged. With unequal dtypes they become fp32 operands in
    tf32, which represents bf16 and fp16 exactly. With any fp32 operand, products are full fp32.
    """
    if INTERPRETED or torch.float32 in dtypes:
        return tl.float32, "ieee"
    if len(set(dtypes)) > 1:
        return tl.float32, "tf32"
    return (tl.bfloat16 if dtypes[0] == torch.bfloat16 else tl.float16), "ieee"


def sections(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the start of each of several int32 arrays in one buffer, and the length of the buffer."""
    aligned = [-(-size // ALIGNMENT_INTS) * ALIGNMENT_INTS for size in sizes]
    ends = np.cumsum(aligned).tolist()
    return [end - size for end, size in zip(ends, aligned, strict=True)], max(ALIGNMENT_INTS, ends[-1])


def host_ints(length: int, device: torch.device) -> Tensor:
    """Return zeros [length] int32 in memory from which a GPU can copy asynchronously.

    The memory is new in each step: torch's pinned allocator reuses memory only after copies from it are done.
    """
    return torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")


def section(ints: Int32, start: int, *shape: int) -> Int32:
    """Return a writable view of a section of a buffer, in this shape."""
    return ints[start : start + math.prod(shape)].reshape(shape)


def power_of_two(n: int, least: int = 16) -> int:
    """Return the next power of two, at least `least`, the minimum of `tl.dot`."""
    return max(least, 1 << (n - 1).bit_length())
