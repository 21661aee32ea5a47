"""Request AMX registers from the system, without which a process may not use them. Imports no torch."""

import ctypes
import logging
import sys
from functools import cache

from sgmv_kernels.cpu_runtime.processor import features

logger = logging.getLogger(__name__)
NEEDED_BY_AMX = ("amx-tile", "amx-int8", "avx512vnni")
"""Features of the processor, by LLVM's names."""
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""A system call of Linux on x86-64, `ARCH_REQ_XCOMP_PERM`, and the registers' number there (Linux, x86/xstate)."""


@cache
def may_use_amx() -> bool:
    """Return whether this process may use AMX registers: the processor has them, and the system allows it."""
    known = features()
    if not (sys.platform == "linux" and all(known.get(name) for name in NEEDED_BY_AMX)):
        return False
    is_allowed: bool = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
    if not is_allowed:
        logger.info("the processor has AMX, but the system does not let this process use it")
    return is_allowed
