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
    """Say where a replica listens, and what it is."""

    id: str
    # `http://host:port`, without a path.
    url: str
    # Speed, as a multiple of a usual replica's.
    weight: float = 1.0
    is_ready: bool = True
    # `prefill`, `decode` or `both`.
    role: str = BOTH
    # Fingerprint of the model, its formats and kernels: equal ones compute equal tokens. Empty: not known.
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Hold what a replica said of itself."""

    model: str
    rates: WorkRates
    is_ready: bool
    # Requests that run or wait, and the seconds until they have ended if no further ones came.
    requests: int
    seconds_ahead: float
    # Adapters in its pool.
    adapters: int


class Chooser(Protocol):
    """Choose among replicas; an edge has one."""

    def choose(self, demand: Demand, tried: Collection[str]) -> AbstractAsyncContextManager[ReplicaAddress]:
        """Return a context that holds a place at the best replica that is not in `tried`, while it is open.

        Raises:
            NoReplicaReady: on entering; all ready replicas were tried, or none is ready.
        """

    def choose_prefill(self, prompt: Demand, kernels: str, failing: Collection[str]) -> "_Prefilling":
        """Return a context that holds a place at a replica that computes prompts for others, while it is open; None,
        if there is none.

        Args:
            kernels: fingerprint that it must have.
            failing: ids of replicas that did not answer a moment ago.
        """

    def replicas(self) -> Sequence[ReplicaAddress]:
        """Return all replicas that are known, ready or not."""

    def loads_s(self) -> Mapping[str, float]:
        """Return the seconds of work ahead of every replica."""

    def on_figures(self, replica_id: str, figures: ReplicaFigures) -> None:
        """Take what a replica says of its readiness and work; one that is not known any more is ignored."""

    def on_no_figures(self, replica_id: str) -> None:
        """Take a replica for ready and idle that answers without figures: what it said may not be true any more."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Give replicas work as these weights say, beside those that their addresses have."""


_Prefilling = AbstractContextManager[ReplicaAddress | None]


class StaticChooser:
    """Choose among replicas that stay where they are, by the same placement that a simulation runs.

    Args:
        addresses: all of them; `set_addresses` replaces the list.
        placement: of which only this chooser sets the replicas.
    """

    def __init__(self, addresses: Sequence[ReplicaAddress], placement: Placement) -> None:
        self._placement = placement
        # Of prompts that are computed for the answers of other replicas.
        self._prompts = make_placement(placement.name)
        self._weights: Mapping[str, float] = {}
        # Requests that run, by replica.
        self._sent: Counter[str] = Counter()
        self.set_addresses(addresses)

    def set_addresses(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Replace the list of replicas; what runs on those that stay keeps counting."""
        self._addresses = {address.id: address for address in addresses}
        prefill = [one for one in addresses if one.role == PREFILL]
        self._prompts.set_replicas(map(self._placed, prefill))
        # They answer, too, where no other replica does.
        self._placement.set_replicas(map(self._placed, [one for one in addresses if one.role != PREFILL] or prefill))

    @asynccontextmanager
    async def choose(self, demand: Demand, tried: Collection[str]) -> AsyncIterator[ReplicaAddress]:
        chosen = next((name for name in self._placement.rank(demand) if name not in tried), None)
        if chosen is None:
            raise NoReplicaReady(f"{len(tried)} replicas could not answer", retry_after_s=RETRY_AFTER_S)
        with self.sent_to(self._placement, chosen, demand) as replica:
            yield replica

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
        """Count a request's work at a replica for the block."""
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

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.set_addresses(self.replicas())

    def loads_s(self) -> Mapping[str, float]:
        return {**self._prompts.loads_s(), **self._placement.loads_s()}

    def replicas(self) -> Sequence[ReplicaAddress]:
        return tuple(self._addresses.values())

    def _set_ready(self, replica_id: str, is_ready: bool) -> None:
        address = self._addresses.get(replica_id)
        if address is not None and address.is_ready != is_ready:
            self._addresses[replica_id] = replace(address, is_ready=is_ready)
            self.set_addresses(self.replicas())

    def _report(self, replica_id: str, report: ReplicaReport) -> None:
        for placement in (self._placement, self._prompts):
            placement.on_report(replica_id, report)

    def _placed(self, one: ReplicaAddress) -> Replica:
        return Replica(one.id, one.weight * self._weights.get(one.id, 1.0), one.is_ready)
