"""How fast something drains, measured only while there is something to drain. No torch.

Sums that fade, as in `traffic`: an amount, and the time in which it went, both count for less the longer ago they were.
Their quotient is right from the first amount on, and an idle hour changes nothing.
"""

import math

FADE_S = 10.0


class DrainRate:
    """An amount a second. Whoever owns it says when time has passed."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def passed(self, seconds: float) -> None:
        """So long there was something to drain."""
        fade = math.exp(-seconds / FADE_S)
        self._amount *= fade
        self._seconds = self._seconds * fade + FADE_S * (1.0 - fade)

    def add(self, amount: float) -> None:
        """So much has gone."""
        self._amount += amount

    def seconds_for(self, amount: float) -> float | None:
        """How long so much will take; None: nothing was measured yet."""
        if not self._amount or not self._seconds:
            return None
        return amount * self._seconds / self._amount
