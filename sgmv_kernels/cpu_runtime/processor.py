"""What this processor can do, by LLVM's names. Imports no torch."""

import ctypes
import platform
from collections.abc import Mapping

import llvmlite.binding as llvm

IS_ARM = platform.machine() in ("aarch64", "arm64")
SIGNED_DOT = "dotprod"
"""ARM's products of signed bytes, four to a lane."""
_HWCAP, _ASIMDDP = 16, 1 << 20
"""Key of the word in which Linux says what an ARM processor can do, and its bit for these products (elf_hwcaps)."""


def features() -> Mapping[str, bool]:
    """Return the features of this processor and whether it has each. LLVM does not look for all of ARM's."""
    found = dict(llvm.get_host_cpu_features())
    return found | {SIGNED_DOT: bool(ctypes.CDLL(None).getauxval(_HWCAP) & _ASIMDDP)} if IS_ARM else found


def name_and_features() -> str:
    """Return all that machine code for this processor depends on."""
    flags = (f"{'+' if has else '-'}{name}" for name, has in sorted(features().items()))
    return f"{llvm.get_host_cpu_name()} {','.join(flags)}"
