"""What this machine reads and computes in a second: a probe of about two seconds, in this process, on all its cores.

Bandwidth: memory read front to back, far more of it than a cache holds. fp32: a large product of matrices, which is
what a BLAS is best at. int8: 4-bit codes by int8 activations, as the server computes
them where its processor is fastest.
"""

import os
import time
from collections.abc import Callable

from api.bench.work import Rates

READ_BYTES = 256 << 20
CHUNK = 1 << 20
ROWS, WIDTH = 512, 1024
ROUNDS = 7


def measure() -> Rates:
    """The best of several rounds each. Imports torch."""
    # As `serve` does, before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    return Rates(read_bytes=read_bandwidth(), fp32_ops=_fp32_ops(), int8_ops=_int8_ops())


def read_bandwidth() -> float:
    """Bytes a second."""
    import torch

    from sgmv_kernels.kernel_code import address_of
    from sgmv_kernels.team import arguments, run, team_size

    buffer = torch.ones(READ_BYTES, dtype=torch.uint8)
    try:
        kernel = address_of("probe_numba", "read")
    except ImportError:
        # Without Numba: a sum of large numbers, which reads about as fast.
        words = buffer.view(torch.float32)
        return READ_BYTES / _least(words.sum)
    chunks = READ_BYTES // CHUNK
    args = arguments(chunks, buffer.data_ptr(), CHUNK, 0)
    return READ_BYTES / _least(lambda: run(kernel, args, team_size(), chunks))


def _fp32_ops() -> float:
    import torch

    a, b = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    return 2 * ROWS * WIDTH * WIDTH / _least(lambda: a @ b)


def _int8_ops() -> float:
    import torch

    from lorasrv.quant import get_format
    from sgmv_kernels.ops import Ops

    with torch.inference_mode():
        fmt = get_format("int4", Ops(torch.device("cpu")))
        linear = fmt.linear(torch.ones(WIDTH, WIDTH), None, torch.float32)
        x = torch.ones(ROWS, WIDTH)
        return 2 * ROWS * WIDTH * WIDTH / _least(lambda: linear(x))


def _least(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
