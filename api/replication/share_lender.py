"""Divide the limits of adapters among the servers of a registry; the registry's side of `shares.py`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.replication.leases import Leases
from api.replication.shares import ShareQuestion, ShareReport, divide
from lorasrv.config import NO_SHARE, LimitShare

TURN_S = 4.0
"""If a limit is too small for all servers, the time for which one keeps its share before the next one gets it."""
HERE = ""
"""Name of the registry's own engine among its followers."""
_LEAST = 1e-6
"""A smaller part of a rate is a rounding error."""


@dataclass(slots=True)
class _Claim:
    """Hold the most that one server may be using of an adapter's limits, and what it wants."""

    report: ShareReport
    # Whether it has enough to run one request, or all beams of one, and since when this has been so.
    is_served: bool
    since_s: float

    def precedence(self, now_s: float) -> tuple[int, float]:
        """Return the sort key of servers if a limit is not enough for all.

        First servers that were served less than `TURN_S` ago, then unserved ones, the longest wait first, then the
        other served ones, the most recently served first.
        """
        if not self.is_served:
            return 1, self.since_s
        return (0, self.since_s) if now_s - self.since_s < TURN_S else (2, -self.since_s)


class ShareLender:
    """Decide which share each server may hold. For the event loop's thread.

    Nothing is granted until every server that may hold a share has reported it: the registry's own engine and, after a
    restart, the followers of the previous process, unless their leases have ended.

    Args:
        leases: leases of the followers.
        limits_of: returns an adapter's recorded limits by name.
    """

    def __init__(
        self,
        leases: Leases,
        limits_of: Callable[[str], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases, self._limits_of, self._clock = leases, limits_of, clock
        # Number of each server's latest question.
        self._numbers: dict[str, int] = {}
        # By adapter id, then by server.
        self._claims: dict[str, dict[str, _Claim]] = {}
        self._claimed: dict[str, list[str]] = {}

    def lend(self, server: str, question: ShareQuestion) -> dict[str, Any]:
        """Record the shares that a server reports, and return those that it may hold, as JSON."""
        for gone in self._numbers.keys() - {HERE, *self._leases.replicas()}:
            self._take_out(gone)
            del self._numbers[gone]
        if question.number <= self._numbers.get(server, -1):
            # A later question came first: the server ignores this answer.
            return {"number": question.number, "shares": []}
        self._numbers[server] = question.number
        # After this question, earlier answers are ignored: the server holds what it reports.
        before = self._take_out(server)
        self._claimed[server] = [report.adapter_id for report in question.shares]
        for report in question.shares:
            claims = self._claims.setdefault(report.adapter_id, {})
            claims[server] = self._claim(report, before.get(report.adapter_id))
        answers = []
        for report in question.shares:
            if (share := self._share(server, report.adapter_id)) is not None:
                claim = self._claims[report.adapter_id][server]
                held = report.held.union(share)
                claim.report = report._replace(max_running=held.max_running, tokens_per_s=held.tokens_per_s)
                answers.append((report.adapter_id, share.max_running, share.tokens_per_s))
        return {"number": question.number, "shares": answers}

    def _take_out(self, server: str) -> dict[str, _Claim]:
        """Remove and return a server's claims by adapter id."""
        found = {}
        for adapter_id in self._claimed.pop(server, ()):
            claims = self._claims[adapter_id]
            found[adapter_id] = claims.pop(server)
            if not claims:
                del self._claims[adapter_id]
        return found

    def _claim(self, report: ShareReport, before: _Claim | None) -> _Claim:
        most = self._limits_of(report.adapter_id).get("max_running")
        is_served = not report.wanted or most is None or _running(report, most) >= min(report.together, most)
        goes_on = before is not None and before.is_served == is_served and before.report.wanted and report.wanted
        return _Claim(report, is_served, before.since_s if before is not None and goes_on else self._clock())

    def _share(self, server: str, adapter_id: str) -> LimitShare | None:
        """Return the share that a server may hold of an adapter's limits; None: the adapter has no limits."""
        limits = self._limits_of(adapter_id)
        most, rate = limits.get("max_running"), limits.get("tokens_per_s")
        if most is None and rate is None:
            return None
        claims, now_s = self._claims[adapter_id], self._clock()
        reports = {name: claim.report for name, claim in claims.items()}
        askers = [name for name in claims if reports[name].wanted]
        askers.sort(key=lambda name: (claims[name].precedence(now_s), name))
        weights: dict[str, float] = {name: reports[name].wanted for name in askers}
        running = None
        if most is not None:
            held = {name: _running(report, most) for name, report in reports.items()}
            wanted, together = ([getattr(reports[n], of) for n in askers] for of in ("wanted", "together"))
            parts = divide(int(most), wanted, together)
            weights = {name: max(part, held[name]) for name, part in zip(askers, parts, strict=True)}
            # Divide what nobody wants now among the servers that ask, for their next requests.
            spare, rest = divmod(int(most) - sum(parts), len(askers)) if askers else (0, 0)
            targets = {
                name: part + spare + (place < rest)
                for place, (name, part) in enumerate(zip(askers, parts, strict=True))
            }
            # What servers before this one have not received yet is not free.
            before = askers[: askers.index(server)] if server in targets else askers
            owed = sum(max(0, targets[name] - held[name]) for name in before)
            running = int(self._part(most, owed, targets.get(server, 0), held, server))
        if rate is None:
            return LimitShare(running, None) if running else NO_SHARE
        target = rate * weights[server] / sum(weights.values()) if weights.get(server) else 0.0
        part = self._part(rate, 0.0, target, {name: _rate(report, rate) for name, report in reports.items()}, server)
        return NO_SHARE if running == 0 or part < _LEAST * rate else LimitShare(running, part)

    def _part(self, limit: float, owed: float, target: float, held: Mapping[str, float], server: str) -> float:
        """Return what a server may hold of one limit: its target, at most what it holds plus what is free.

        A server whose lease had ended may report requests that went on since, although its share is lent to others; it
        keeps only what these leave.
        """
        is_known = HERE in self._numbers and self._leases.are_all_known
        left = limit - sum(held.values())
        kept = max(0.0, held[server] + min(0.0, left))
        return min(target, kept + max(0.0, left - owed if is_known else 0.0))


def _running(report: ShareReport, most: float) -> float:
    """Return how many requests may run at a server; it may not have learned yet that there is a limit."""
    return max(report.wanted, most) if report.max_running is None else report.max_running


def _rate(report: ShareReport, rate: float) -> float:
    return rate if report.tokens_per_s is None else report.tokens_per_s
