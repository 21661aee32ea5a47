"""Functions that Numba kernels consist of: kept as LLVM code, which a kernel includes and optimizes.

`njit` would optimize every function, compile it to machine code and wrap it for Python, before its callers include its
LLVM code and do the same again: the attention kernel took 5.0 s to compile in that way, and takes 1.8 s in this way.
"""

import ctypes
from typing import Any

from numba import _dynfunc, njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

_REFUSED = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
"""Address that Python would call, which raises an error: a part has no machine code."""


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Hold the LLVM code of a part, and of the parts that it calls."""

    def finalize(self) -> None:
        """Link and clean up; the kernel's own library optimizes."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        passes, builder = self._codegen._module_pass_manager(
            opt=0, loop_vectorize=False, slp_vectorize=False, cost="cheap"
        )
        passes.run(self._final_module, builder)
        self._finalized = True


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


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[PassManager]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [(_PartLowering if p is NativeLowering else p, why) for p, why in manager.passes]
        manager.finalize()
        return [manager]


kernel_part = njit(pipeline_class=_PartCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorate a function that only kernels and other parts call."""
