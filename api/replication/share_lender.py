"""Divide the limits of adapters among the servers of a registry; the registry's side of `shares.py`."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.replication.leases import Leases
from api.replication.shares import ShareQuestion, ShareReport, divide
from lorasrv.config import NO_SHARE, LimitShare

TURN_S = 4.0
"""Where a limit is too small for all servers, one that got something of it keeps that so long before the next."""
HERE = ""
"""Name of the registry's own engine among its followers."""
_LEAST = 1e-6
"""A smaller part of a rate is an error of floating point."""


@dataclass(slots=True)
class _Claim:
    """Hold what one server may be using of an adapter's limits, at most, and what it wants."""

    report: ShareReport
    # Whether it has what it needs to run one request, or the beams of one; since when.
    is_served: bool
    since_s: float

    def precedence(self, now_s: float) -> tuple[int, float]:
        """Return the order in which servers get what is not enough for all: who has just got something, who has waited
        longest, who has had it longest."""
        if not self.is_served:
            return 1, self.since_s
        return (0, self.since_s) if now_s - self.since_s < TURN_S else (2, -self.since_s)


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
        # Of each server's latest question.
        self._numbers: dict[str, int] = {}
        # By adapter, then by server.
        self._claims: dict[str, dict[str, _Claim]] = {}
        self._claimed: dict[str, list[str]] = {}

    def lend(self, server: str, question: ShareQuestion) -> dict[str, Any]:
        """Take over what a server holds, and return what it may hold, as JSON."""
        for gone in self._numbers.keys() - {HERE, *self._leases.replicas()}:
            self._take_out(gone)
            del self._numbers[gone]
        if question.number <= self._numbers.get(server, -1):
            # A later one came first: this answer is not waited for.
            return {"number": question.number, "shares": []}
        self._numbers[server] = question.number
        # An answer that did not arrive never will: the server holds what it says.
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
        """Forget what a server claims; return it."""
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
        """Return what a server may hold of an adapter's limits; None: there are none."""
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
            # What is not wanted now goes to the servers whose requests come next.
            spare, rest = divmod(int(most) - sum(parts), len(askers)) if askers else (0, 0)
            targets = {
                name: part + spare + (place < rest)
                for place, (name, part) in enumerate(zip(askers, parts, strict=True))
            }
            # What servers further forward have not had yet is not free.
            before = askers[: askers.index(server)] if server in targets else askers
            owed = sum(max(0, targets[name] - held[name]) for name in before)
            running = int(self._part(most - owed, targets.get(server, 0), held, server))
        if rate is None:
            return LimitShare(running, None) if running else NO_SHARE
        target = rate * weights[server] / sum(weights.values()) if weights.get(server) else 0.0
        part = self._part(rate, target, {name: _rate(report, rate) for name, report in reports.items()}, server)
        return NO_SHARE if running == 0 or part < _LEAST * rate else LimitShare(running, part)

    def _part(self, limit: float, target: float, held: Mapping[str, float], server: str) -> float:
        """Return what a server may hold of one limit: its target, but no more than it has and what is free."""
        is_known = HERE in self._numbers and self._leases.are_all_known
        free = limit - sum(held.values()) if is_known else 0.0
        return min(target, held[server] + max(0.0, free))


def _running(report: ShareReport, most: float) -> float:
    """Return how many requests may run at a server, which may not have heard yet that there is a limit."""
    return max(report.wanted, most) if report.max_running is None else report.max_running


def _rate(report: ShareReport, rate: float) -> float:
    return rate if report.tokens_per_s is None else report.tokens_per_s
