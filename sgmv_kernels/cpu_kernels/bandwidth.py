"""Numba kernel that measures read bandwidth, the reference of `make bench-kernels`."""

from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.memory_access import read_all, take_next

NUM_CHUNKS, BUFFER, CHUNK_BYTES, SINK = range(2, 6)
"""Indices of the kernel's arguments, after the counters."""


@kernel_part
def _chunks(args):  # type: ignore[no-untyped-def]
    while True:
        chunk = take_next(args.ctypes.data)
        if chunk >= args[NUM_CHUNKS]:
            return
        total = read_all(args[BUFFER] + chunk * args[CHUNK_BYTES], args[CHUNK_BYTES])
        # Uses the sum, so that the compiler does not remove it.
        if total == 1:
            args[SINK] = total


KERNELS = {"read": _chunks}
