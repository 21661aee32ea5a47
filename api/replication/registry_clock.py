"""The registry's time: its keys expire by it at followers, too, whatever their own wall clocks say."""

import time
from collections.abc import Callable


class RegistryClock:
    """Tell the time that the registry last reported, advanced by this server's monotonic clock.

    It is never behind the registry's time, and ahead by at most the duration of a question. So no key is honoured for
    longer than at the registry.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Seconds that the registry's time is ahead of this server's clock; None: it has not reported yet.
        self._ahead_s: float | None = None

    def on_answer(self, now_s: float, asked_s: float) -> None:
        """Note the registry's time in an answer.

        Args:
            now_s: the registry's time.
            asked_s: when the question was sent, by this server's clock.
        """
        self._ahead_s = now_s - asked_s

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        return time.time() if self._ahead_s is None else self._clock() + self._ahead_s
