"""Room for the results of an open batch: first as many bytes as its input has, then more as results need it."""

from collections.abc import Callable
from dataclasses import dataclass

from api.errors import ApiError

STEP_BYTES = 1 << 20
"""Bytes reserved at a time, if there is room: each reservation counts all files, so there should be few."""


@dataclass(slots=True)
class ResultRoom:
    """Count the bytes that a batch's results use, and the bytes reserved for them. For the event loop."""

    reserved: int
    used: int = 0

    def take(self, num_bytes: int, check_room: Callable[[int], object]) -> None:
        """Count results that are about to be written, after reserving the bytes that are missing for them.

        Args:
            check_room: raises ApiError if there is no room for this many bytes in addition to those reserved.

        Raises:
            ApiError: 507; nothing changed.
        """
        missing = self.used + num_bytes - self.reserved
        if missing > 0:
            try:
                check_room(more := max(missing, STEP_BYTES))
            except ApiError:
                check_room(more := missing)
            self.reserved += more
        self.used += num_bytes
