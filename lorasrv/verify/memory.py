"""How much memory a verification takes beside the server."""

import math

from lorasrv.errors import VerificationUnavailable
from lorasrv.host_memory import free_bytes
from lorasrv.models.family import tensor_shapes
from lorasrv.models.spec import ModelSpec

LIBRARY_BYTES = 1280 << 20
"""torch, transformers and PEFT, the kernels, on a first start their compiler, and logits."""
FLOAT_BYTES = 4


def needed_bytes(spec: ModelSpec, weight_bytes: int, adapter_bytes: int) -> int:
    """The base once as served and once in float32, one stack of weights on its way, and the adapter five times: the
    file twice, its panels, and in float32.
    """
    sizes = [math.prod(shape) for shape in tensor_shapes(spec).values()]
    stacked = max(sum(site.out_features) * site.in_features for site in spec.sites())
    passing = FLOAT_BYTES * max(*sizes, stacked)
    return FLOAT_BYTES * sum(sizes) + weight_bytes + 2 * passing + 5 * adapter_bytes + LIBRARY_BYTES


def check_memory(needed: int) -> None:
    """Raises: VerificationUnavailable: less is free than a verification would take."""
    free = free_bytes()
    if needed > free:
        raise VerificationUnavailable(
            f"verifying takes about {_gib(needed)} beside the server, most of it the base in float32; {_gib(free)} are "
            "free. Verify on a machine with more, or try nevertheless with ignore_memory (--ignore-memory)"
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
