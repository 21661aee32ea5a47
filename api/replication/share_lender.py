"""Divide the limits of adapters among the servers of a registry; the registry's side of `shares.py`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.replication.leases import Leases
from api.replication.lending import RESERVE
from api.replication.shares import ShareQuestion, ShareReport, divide
from lorasrv.config import NO_SHARE, LimitShare

TURN_S = 4.0
"""Where there are more servers than a limit has parts, they take turns of this length."""
HERE = ""
"""Name of the registry's own engine among its followers."""
_LEAST = 1e-6
"""A smaller part of a rate is an error of floating point."""


@dataclass(slots=True)
class _ShareBook:
    """Hold the shares of one server."""

    # Of the latest question.
    number: int
    # What it may be using, at most.
    shares: dict[str, ShareReport]


class ShareLender:
    """Say what each server may hold. For the event loop's thread.

    Nothing is granted before all who may hold anything have told it: the registry's own engine, and after a start the
    followers of the process before, or until their leases are over.

    Args:
        leases: of the followers.
        limits_of: returns the limits that an adapter's record has, by name.
    """

    def __init__(
        self,
        leases: Leases,
        limits_of: Callable[[str], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases, self._limits_of, self._clock = leases, limits_of, clock
        self._books: dict[str, _ShareBook] = {}

    def lend(self, server: str, question: ShareQuestion) -> dict[str, Any]:
        """Take over what a server holds, and return what it may hold, as JSON."""
        alive = {HERE, *self._leases.replicas()}
        self._books = {name: book for name, book in self._books.items() if name in alive}
        before = self._books.get(server)
        if before is not None and question.number <= before.number:
            # A later one came first: nobody waits for this answer.
            return {"number": question.number, "shares": []}
        # An answer that did not arrive never will: the server holds what it says.
        book = self._books[server] = _ShareBook(
            question.number, {report.adapter_id: report for report in question.shares}
        )
        answers = []
        for report in question.shares:
            share = self._share(server, report)
            held = report.held.union(share)
            book.shares[report.adapter_id] = ShareReport(
                report.adapter_id, held.max_running, held.tokens_per_s, report.wanted
            )
            answers.append((report.adapter_id, share.max_running, share.tokens_per_s))
        return {"number": question.number, "shares": answers}

    def _share(self, server: str, report: ShareReport) -> LimitShare:
        """Return what a server may hold of an adapter's limits."""
        limits = self._limits_of(report.adapter_id)
        most, rate = limits.get("max_running"), limits.get("tokens_per_s")
        found = {name: book.shares.get(report.adapter_id) for name, book in sorted(self._books.items())}
        reports = {name: one for name, one in found.items() if one is not None and (one.wanted or one is report)}
        others = [one for name, one in found.items() if one is not None and name != server]
        weights = {name: one.wanted for name, one in reports.items()}
        running = None
        if most is not None:
            reserve = int(RESERVE * most / len(self._books))
            wanted = [max(one.wanted, reserve) if one.wanted else 0 for one in reports.values()]
            parts = divide(int(most), wanted, int(self._clock() / TURN_S))
            targets = dict(zip(reports, parts, strict=True))
            running = int(self._part(most, targets[server], _running(report), sum(map(_running, others))))
            weights = {name: max(targets[name], _running(one)) if one.wanted else 0 for name, one in reports.items()}
        if rate is None:
            return LimitShare(running, None)
        target = rate * weights[server] / sum(weights.values()) if weights[server] else 0.0
        part = self._part(rate, target, _rate(report, rate), sum(_rate(one, rate) for one in others))
        return NO_SHARE if running == 0 or part < _LEAST * rate else LimitShare(running, part)

    def _part(self, limit: float, target: float, held: float, held_by_others: float) -> float:
        """Return what a server may hold of one limit: its target, but no more than it has and nobody has."""
        is_known = HERE in self._books and self._leases.are_all_known
        free = limit - held - held_by_others if is_known else 0.0
        return min(target, held + max(0.0, free))


def _running(report: ShareReport) -> int:
    """Return how many requests may run at a server, which may not have heard yet that there is a limit."""
    return report.wanted if report.max_running is None else report.max_running


def _rate(report: ShareReport, rate: float) -> float:
    return rate if report.tokens_per_s is None else report.tokens_per_s
