"""The time of an event loop, which passes only when a test lets it."""

import asyncio

import pytest
from clock import Clock


class LoopTime(Clock):
    """The time of the running event loop."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        patch.setattr(asyncio.get_running_loop(), "time", self)

    async def let_pass(self, seconds: float = 0.0) -> None:
        """Let time pass, and other tasks do what they can do then."""
        self.now += seconds
        for _ in range(10):
            await asyncio.sleep(0)
