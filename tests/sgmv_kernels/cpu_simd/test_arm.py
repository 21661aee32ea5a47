"""Code for ARM processors, as far as any machine can tell: which instructions it has. Whether their numbers are right,
the other tests show on such a processor or in an emulator (CONTRIBUTING.md)."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from sgmv_kernels.cpu_simd import quant_ir
from sgmv_kernels.cpu_simd.quant_ir import BYTES, INTS, LANES, SignedDot, SmallDot, look_up

REGISTERS = LANES // 4
"""Registers of four int32 that hold a vector."""


def of_vectors(kinds: list[Any], body: Callable[..., Any]) -> str:
    """Return a function of vectors in memory, as LLVM's code."""
    module = ir.Module()
    pointers = [kind.as_pointer() for kind in (INTS, *kinds)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers), "of_vectors")
    b = ir.IRBuilder(function.append_basic_block())
    place, *vectors = function.args
    b.store(b.bitcast(body(b, *map(b.load, vectors)), INTS), place)
    b.ret_void()
    llvm.parse_assembly(str(module)).verify()
    return str(module)


@pytest.mark.parametrize("dot", [SmallDot(), SignedDot()], ids=lambda dot: type(dot).__name__)
def test_four_products_are_one_instruction(dot: SmallDot | SignedDot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_ir, "HAS_SIGNED_DOT", True)
    monkeypatch.setattr(SmallDot, "in_pairs", False)
    code = of_vectors([INTS, BYTES, BYTES], lambda b, *vectors: dot.end(b, dot.step(b, *vectors)))
    assert code.count("sdot $0.4s, $2.16b, $3.16b") == REGISTERS
    assert "mul" not in code


def test_a_look_up_of_sixteen_bytes_is_one_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_ir, "IS_ARM", True)
    monkeypatch.setattr(quant_ir, "HAS_PAIR_DOT", False)
    code = of_vectors([BYTES, BYTES], look_up)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="generic", opt=2)
    text = machine.emit_assembly(llvm.parse_assembly(code))
    assert text.count("tbl\t") == REGISTERS
    assert "cmeq" not in text
