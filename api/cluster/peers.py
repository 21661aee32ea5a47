"""Name the peer from which the answering replica takes pages of the prompt (docs/pages.md).

For a long prompt, the peer is a replica of the role `prefill`, if there is one. Otherwise it is the replica that
answered the last request with the same beginning, if the placement has chosen another one this time. Pages that do not
arrive are computed.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from api.cluster.chooser import Chooser, ReplicaAddress
from api.cluster.edge_stats import EdgeStats
from api.config.replication_settings import PREFILL as PREFILL_ROLE
from api.replication.peer_headers import PAGES, PREFILL
from lorasrv.placement.placement import Demand
from lorasrv.placement.prefill import is_worth_asking
from lorasrv.placement.rendezvous import hash_of

MAX_BEGINNINGS = 1 << 16
"""Most recent beginnings of requests for which the answering replica is remembered."""
PeerHeaders = tuple[tuple[bytes, bytes], ...]


def taken_from(replica: ReplicaAddress) -> PeerHeaders:
    """Return the header that makes the next replica take pages from this one."""
    return ((PAGES.encode(), replica.url.encode()),)


class Peers:
    """Remember which replicas pages may be taken from, for all requests of an edge."""

    def __init__(self, chooser: Chooser, stats: EdgeStats) -> None:
        self.chooser, self.stats = chooser, stats
        # Hash of a request's beginning -> id of the replica that answered it.
        self._answered: OrderedDict[int, str] = OrderedDict()

    def of(self, demand: Demand, client: str) -> "RequestPeers":
        """Return which replicas one request's pages may be taken from.

        Args:
            client: identifies the client; clients do not share pages.
        """
        token_s = self.stats.estimator.rates.prompt_token_s
        if not is_worth_asking(demand.prompt_tokens, token_s):
            return RequestPeers(self, demand)
        beginning = hash_of(f"{client}\n{demand.adapter_id}\n{demand.session}")
        if not any(one.role == PREFILL_ROLE and one.is_ready for one in self.chooser.replicas()):
            return RequestPeers(self, demand, beginning=beginning)
        prompt_s = demand.prompt_tokens * token_s
        answer = replace(demand, work_s=demand.work_s - prompt_s, prompt_tokens=0.0)
        return RequestPeers(self, answer, replace(demand, work_s=prompt_s), beginning)

    def answered_last(self, beginning: int) -> ReplicaAddress | None:
        """Return the replica that last answered a request with this beginning; None if it is not ready."""
        name = self._answered.get(beginning)
        return next((one for one in self.chooser.replicas() if one.id == name and one.is_ready), None)

    def on_answering(self, beginning: int, replica: ReplicaAddress) -> None:
        """Note that a replica answers a request with this beginning."""
        self._answered[beginning] = replica.id
        self._answered.move_to_end(beginning)
        if len(self._answered) > MAX_BEGINNINGS:
            self._answered.popitem(last=False)


@dataclass(frozen=True, slots=True)
class RequestPeers:
    """Name the peers of one request's replicas."""

    peers: Peers
    # Demand on the replica that answers.
    answer: Demand
    # Demand on the replica that computes the prompt; None: no other replica computes it.
    prompt: Demand | None = None
    # Hash of the request's beginning; None: the request is too short to ask for pages.
    beginning: int | None = None

    @contextmanager
    def named(self, answering: ReplicaAddress, failing: Collection[str]) -> Iterator[PeerHeaders]:
        """Enter with the header that names the answering replica's peer, and hold a place at the peer meanwhile.

        Args:
            failing: ids of replicas that recently did not answer.
        """
        with self._prefill(answering, {*failing, answering.id}) as prefill:
            if prefill is not None:
                self.peers.stats.peers["prefill"] += 1
                yield ((PREFILL.encode(), prefill.url.encode()),)
                return
            last = None if self.beginning is None else self.peers.answered_last(self.beginning)
            if last is None or last.kernels != answering.kernels or last.id in {*failing, answering.id}:
                yield ()
                return
            self.peers.stats.peers["pages"] += 1
            yield taken_from(last)

    def on_answering(self, replica: ReplicaAddress) -> None:
        """Note that a replica answers this request."""
        if self.beginning is not None:
            self.peers.on_answering(self.beginning, replica)

    def _prefill(
        self, answering: ReplicaAddress, excluded: Collection[str]
    ) -> AbstractContextManager[ReplicaAddress | None]:
        if self.prompt is None:
            return nullcontext()
        return self.peers.chooser.choose_prefill(self.prompt, answering.kernels, excluded)
