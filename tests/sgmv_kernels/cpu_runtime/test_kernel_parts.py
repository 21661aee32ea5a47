"""Parts of kernels are compiled inside the kernels that call them, and nowhere else."""

import ctypes

import pytest

from sgmv_kernels.cpu_runtime.kernel_parts import compiled, kernel_part


@kernel_part
def _square(value):  # type: ignore[no-untyped-def]
    return value * value


@kernel_part
def _sum_of_squares(args):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(1, 4):
        total += _square(args[i])
    args[0] = total


@pytest.fixture(scope="module")
def kernel():
    return compiled(_sum_of_squares)


def test_a_kernel_takes_in_the_parts_of_its_parts(kernel) -> None:
    block = (ctypes.c_int64 * 4)(0, 2, 3, 4)
    kernel.ctypes(ctypes.addressof(block))
    assert block[0] == 29


def test_a_part_has_no_machine_code_and_refuses_python(kernel) -> None:
    (part,) = _square.overloads.values()
    assert not part.library._codegen._engine.is_symbol_defined(part.fndesc.llvm_func_name)
    with pytest.raises(TypeError):
        _square(3)
