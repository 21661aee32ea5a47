"""Count work instead of timing it, so that a test can show that work does not grow with the amount of data."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(call: Callable[[], object]) -> int:
    """Return the number of Python instructions that a call executes; work in C, such as a sort, is not counted."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
