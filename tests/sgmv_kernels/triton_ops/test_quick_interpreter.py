"""Triton's interpreter as tests have it computes the bits of the interpreter as it is.

That one runs this file as a script, which prints a digest a result.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from attention_cases import BF16, FLOAT, make_case
from kernel_pools import KernelPool
from quantized_codes import random_codes

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.formats.weight_codes import INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


def computed() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield results of kernels that loop, branch, reduce, multiply and call functions of their own."""
    ops = Ops(CPU, "triton")
    torch.manual_seed(0)
    yield "attention", make_case([7, 1, 40], [20, 33, 50], 4, 2, 32, BF16).attend(ops, window=30, softcap=2.0)
    case = make_case([7, 1], [20, 33], 2, 1, 32, FLOAT)
    case.parents = [[-1, 0, 0, 2], ()]
    yield "trees", case.attend(ops)
    pool = KernelPool((SiteDims(80, (48, 40)),), FLOAT, 2, 1024, 600)
    pool.add([[3, 20]], [(0, 500)])
    yield "sgmv", pool.added(ops, [0, -1, 0, 0], 0, *pool.inputs(4, 0))
    for levels in (INT8_LEVELS, Q3H_LEVELS):
        packed = ops.pack_linear(random_codes(levels, 64, 64, 128))
        yield f"{levels} levels", ops.linear(torch.randn(3, 128), packed)


def digests() -> list[str]:
    return [
        f"{name} {hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()}"
        for name, found in computed()
    ]


def test_results_have_the_bits_of_the_interpreter_as_it_is(triton_ops: Ops) -> None:
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.sanitize_overflow
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert digests() == done.stdout.splitlines()


if __name__ == "__main__":
    print(*digests(), sep="\n")
