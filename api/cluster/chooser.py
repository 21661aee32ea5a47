"""Choose the replica that answers a request, and hold its place there until the request is over."""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from api.config.replication_settings import BOTH, PREFILL
from lorasrv.errors import NoReplicaReady
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import RETRY_AFTER_S, Demand, Placement, Replica, ReplicaReport
from lorasrv.placement.work import WorkRates


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Hold where a replica listens, and what it is."""

    id: str
    # `http://host:port`, without a path.
    url: str
    # Speed, as a multiple of a typical replica's.
    weight: float = 1.0
    is_ready: bool = True
    # `prefill`, `decode` or `both`.
    role: str = BOTH
    # Fingerprint of the model, its formats and kernels: replicas with equal ones compute equal tokens. Empty: unknown.
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Hold what a replica reported about itself."""

    model: str
    rates: WorkRates
    is_ready: bool
    # Requests that run or wait, and the seconds until they would end if no others came.
    requests: int
    seconds_ahead: float
    # Adapters in its pool.
    adapters: int


class Chooser(Protocol):
    """Choose among replicas; an edge has one."""

    def choose(self, demand: Demand, tried: Collection[str]) -> AbstractAsyncContextManager[ReplicaAddress]:
        """Return a context that holds a place at the best replica that is not in `tried` while the context is open.

        Raises:
            NoReplicaReady: on entering; all replicas were tried, except those that say that they are not ready.
        """

    def choose_prefill(self, prompt: Demand, kernels: str, failing: Collection[str]) -> "_Prefilling":
        """Return a context that holds a place at a prefill replica while the context is open; it yields None if there
        is no such replica.

        Args:
            kernels: fingerprint that the replica must have.
            failing: ids of replicas that recently did not answer.
        """

    def replicas(self) -> Sequence[ReplicaAddress]:
        """Return all known replicas, ready or not."""

    def loads_s(self) -> Mapping[str, float]:
        """Return the seconds of work ahead of every replica."""

    def on_figures(self, replica_id: str, figures: ReplicaFigures) -> None:
        """Record a replica's readiness and work; ignore a replica that is no longer known."""

    def on_no_figures(self, replica_id: str) -> None:
        """Record a replica that answers without figures as ready and idle: its last figures may be out of date."""

    def on_silence(self, replica_id: str) -> None:
        """Record a replica as not ready until `on_figures` or `on_no_figures` is called, because it does not answer."""

    @property
    def silent(self) -> Collection[str]:
        """Return the ids of the replicas that do not answer; `choose` takes them last."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Multiply the weights of the replicas' addresses by these."""


_Prefilling = AbstractContextManager[ReplicaAddress | None]


class StaticChooser:
    """Choose among a given list of replicas, by the same placement that a simulation runs.

    Args:
        addresses: all replicas; `set_addresses` replaces the list.
        placement: used by this chooser only, which sets its replicas.
    """

    def __init__(self, addresses: Sequence[ReplicaAddress], placement: Placement) -> None:
        self._placement = placement
        # Placement of prompts that one replica computes for another.
        self._prompts = make_placement(placement.name)
        self._weights: Mapping[str, float] = {}
        self._silent: set[str] = set()
        # Number of running requests by replica.
        self._sent: Counter[str] = Counter()
        self.set_addresses(addresses)

    def set_addresses(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Replace the list of replicas; requests that run on replicas of both lists still count."""
        self._silent &= {address.id for address in addresses}
        known = [replace(one, is_ready=one.is_ready and one.id not in self._silent) for one in addresses]
        self._addresses = {address.id: address for address in known}
        prefill = [one for one in known if one.role == PREFILL]
        self._prompts.set_replicas(map(self._placed, prefill))
        # Prefill replicas answer requests if there are no others.
        answering = [one for one in known if one.role != PREFILL] or prefill
        self._placement.set_replicas(map(self._placed, answering))
        self._last = tuple(one.id for one in answering if one.id in self._silent)

    @asynccontextmanager
    async def choose(self, demand: Demand, tried: Collection[str]) -> AsyncIterator[ReplicaAddress]:
        chosen = next((name for name in self._in_order(demand) if name not in tried), None)
        if chosen is None:
            raise NoReplicaReady(f"{len(tried)} replicas could not answer", retry_after_s=RETRY_AFTER_S)
        with self.sent_to(self._placement, chosen, demand) as replica:
            yield replica

    def _in_order(self, demand: Demand) -> Sequence[str]:
        """Return the ready replicas as the placement ranks them, then those that do not answer, which may only be slow.

        Raises:
            NoReplicaReady: there are neither.
        """
        try:
            return (*self._placement.rank(demand), *self._last)
        except NoReplicaReady:
            if not self._last:
                raise
            return self._last

    @contextmanager
    def choose_prefill(self, prompt: Demand, kernels: str, failing: Collection[str]) -> Iterator[ReplicaAddress | None]:
        able = {one.id for one in self._addresses.values() if one.kernels == kernels and one.id not in failing}
        try:
            chosen = next((name for name in self._prompts.rank(prompt) if name in able), None)
        except NoReplicaReady:
            chosen = None
        if chosen is None:
            yield None
            return
        with self.sent_to(self._prompts, chosen, prompt) as replica:
            yield replica

    @contextmanager
    def sent_to(self, placement: Placement, chosen: str, demand: Demand) -> Iterator[ReplicaAddress]:
        """Count a request's work at a replica while the block runs."""
        sent = placement.on_request_sent(chosen, demand)
        self._sent[chosen] += 1
        try:
            yield self._addresses[chosen]
        finally:
            placement.on_request_ended(sent)
            self._sent[chosen] -= 1
            if not self._sent[chosen]:
                del self._sent[chosen]

    def on_figures(self, replica_id: str, figures: ReplicaFigures) -> None:
        self._set_ready(replica_id, figures.is_ready)
        own = self._sent[replica_id]
        self._report(replica_id, ReplicaReport.beside(own, figures.requests, figures.seconds_ahead))

    def on_no_figures(self, replica_id: str) -> None:
        self._set_ready(replica_id, True)
        self._report(replica_id, ReplicaReport())

    def on_silence(self, replica_id: str) -> None:
        self._silent.add(replica_id)
        self.set_addresses(self.replicas())

    @property
    def silent(self) -> Collection[str]:
        return self._silent

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.set_addresses(self.replicas())

    def loads_s(self) -> Mapping[str, float]:
        return {**self._prompts.loads_s(), **self._placement.loads_s()}

    def replicas(self) -> Sequence[ReplicaAddress]:
        return tuple(self._addresses.values())

    def _set_ready(self, replica_id: str, is_ready: bool) -> None:
        address = self._addresses.get(replica_id)
        if address is not None and (address.is_ready != is_ready or replica_id in self._silent):
            self._silent.discard(replica_id)
            self._addresses[replica_id] = replace(address, is_ready=is_ready)
            self.set_addresses(self.replicas())

    def _report(self, replica_id: str, report: ReplicaReport) -> None:
        for placement in (self._placement, self._prompts):
            placement.on_report(replica_id, report)

    def _placed(self, one: ReplicaAddress) -> Replica:
        return Replica(one.id, one.weight * self._weights.get(one.id, 1.0), one.is_ready)
