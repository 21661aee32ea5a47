"""Kernels, and the functions that they consist of: a kernel includes the LLVM code of its parts, and optimizes it once.

`njit` and `cfunc` would optimize every function, compile it to machine code and wrap it for Python, before its callers
include its LLVM code and do the same again: the attention kernel took 5.0 s to compile in that way.
"""

import ctypes
from typing import Any

import numpy as np
from numba import _dynfunc, carray, cfunc, njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

from sgmv_kernels.cpu_arguments.block import WORDS

_REFUSED = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
"""Address that Python would call, which raises an error: a part has no machine code."""


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Hold the LLVM code of one part, as it was emitted."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True


class _KernelLibrary(_PartLibrary):
    """Hold the LLVM code of a kernel with all its parts, and its machine code."""

    def finalize(self) -> None:
        self._codegen._check_llvm_bugs()
        self._raise_if_finalized()
        for library in _callers_first(self):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)
        self._final_module.verify()
        self._finalize_final_module()


def _callers_first(library: Any) -> list[Any]:
    """Return the libraries that a library needs, each before those that it needs: LLVM links only what is called."""
    found: dict[Any, None] = {}

    def visit(needed: Any) -> None:
        for each in needed._linking_libraries:
            if each not in found:
                visit(each)
                found[each] = None

    visit(library)
    return list(reversed(found))


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.library = _PartLibrary(state.targetctx.codegen(), name)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        # Kernels find the part's code by this object.
        entry = _dynfunc.make_function(lowered.fndesc.lookup_module(), name, "", _REFUSED, lowered.env, ())
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(NativeLowering):  # type: ignore[misc]
    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()  # to serialize its object code
        return bool(super().run_pass(state))


def _compiler(lowering: type[NativeLowering]) -> type[CompilerBase]:
    class Compiler(CompilerBase):  # type: ignore[misc]
        def define_pipelines(self) -> list[PassManager]:
            manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
            manager.passes = [(lowering if p is NativeLowering else p, why) for p, why in manager.passes]
            manager.finalize()
            return [manager]

    return Compiler


kernel_part = njit(pipeline_class=_compiler(_PartLowering), no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorate a function that only kernels and other parts call."""
_cfunc = cfunc("void(voidptr)", pipeline_class=_compiler(_KernelLowering), nogil=True, error_model="numpy")


def compiled(work: Any) -> Any:
    """Compile a kernel: a C function with an address as its argument, which gives the part `work` the block of int64
    words there.
    """

    def kernel(raw: Any) -> None:
        work(carray(raw, (WORDS,), np.int64))

    return _cfunc(kernel)
