"""The time of the registry, by which its keys expire, whatever a follower's own wall clock says."""

import time
from collections.abc import Callable


class RegistryClock:
    """Tell the time as the registry has said it last, counted on by this server's monotonic clock.

    It is ahead of the registry's by the time that a question takes at most, and never behind: no key is honoured for
    longer than there.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # What the registry's time is ahead of the clock's; None: it has said nothing yet.
        self._ahead_s: float | None = None

    def on_answer(self, now_s: float, asked_s: float) -> None:
        """Note what the registry's time was in an answer to a question.

        Args:
            asked_s: when it was asked, by this server's clock.
        """
        self._ahead_s = now_s - asked_s

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        return time.time() if self._ahead_s is None else self._clock() + self._ahead_s
