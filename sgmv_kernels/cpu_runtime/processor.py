"""Features of this processor, by LLVM's names. Imports no torch."""

import ctypes
import platform
from collections.abc import Mapping

import llvmlite.binding as llvm

IS_ARM = platform.machine() in ("aarch64", "arm64")
SIGNED_DOT = "dotprod"
"""LLVM's name of ARM's dot products of signed bytes, four to a lane."""
_HWCAP, _ASIMDDP = 16, 1 << 20
"""Key of the word in which Linux reports an ARM processor's features, and the bit for these products (elf_hwcaps)."""


def features() -> Mapping[str, bool]:
    """Return, for each feature, whether this processor has it. LLVM does not detect all of ARM's."""
    found = dict(llvm.get_host_cpu_features())
    return found | {SIGNED_DOT: bool(ctypes.CDLL(None).getauxval(_HWCAP) & _ASIMDDP)} if IS_ARM else found


def name_and_features() -> str:
    """Return the processor's name and features as text: everything that its machine code depends on."""
    flags = (f"{'+' if has else '-'}{name}" for name, has in sorted(features().items()))
    return f"{llvm.get_host_cpu_name()} {','.join(flags)}"
