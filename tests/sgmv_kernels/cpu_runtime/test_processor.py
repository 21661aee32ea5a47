"""What a processor can do, as far as LLVM does not say it."""

from types import SimpleNamespace

import pytest

from sgmv_kernels.cpu_runtime import processor
from sgmv_kernels.cpu_runtime.kernel_names import common_kernels, needs_signed


@pytest.mark.parametrize(("bits", "has_products"), [(1 << 20 | 3, True), (~(1 << 20), False)])
def test_products_of_bytes_of_arm_are_asked_of_the_system(
    bits: int, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide which kernels are compiled, and what these are kept for."""
    asked: list[int] = []
    system = SimpleNamespace(getauxval=lambda kind: asked.append(kind) or bits)
    monkeypatch.setattr(processor, "IS_ARM", True)
    monkeypatch.setattr(processor.llvm, "get_host_cpu_features", lambda: {"neon": True})
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: system)
    assert processor.features() == {"neon": True, "dotprod": has_products}
    assert processor.name_and_features().endswith(f" {'+' if has_products else '-'}dotprod,+neon")
    assert set(asked) == {16}
    assert needs_signed.__wrapped__() is has_products
    monkeypatch.setattr("sgmv_kernels.cpu_runtime.kernel_names.needs_signed", needs_signed.__wrapped__)
    assert (("linear", "int8_signed") in common_kernels("bfloat16", "bfloat16")) is has_products
