"""Suggestions for a name that does not exist: similar known names."""

import difflib
import heapq
from collections.abc import Iterable

NEAR_NAMES = 3
NUM_COMPARED = 32


def near_names(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return up to three of the known names, the most similar first.

    Comparing with difflib takes tens of microseconds a name, too long for thousands: of more than `NUM_COMPARED`,
    only those with the most character pairs in common with the name are compared.
    """
    wanted = name.lower()
    names = list(known)
    if len(names) > NUM_COMPARED:
        pairs = {wanted[i : i + 2] for i in range(len(wanted) - 1)}
        names = heapq.nlargest(
            NUM_COMPARED,
            names,
            key=lambda other: (sum(pair in other for pair in pairs), -abs(len(other) - len(wanted))),
        )
    return tuple(difflib.get_close_matches(wanted, names, NEAR_NAMES))
