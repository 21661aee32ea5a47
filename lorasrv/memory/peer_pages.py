"""Peer pages: prefix pages that are lent to other replicas of the same server, and those taken from them.

A page's hash covers everything that it was computed from (`PrefixCache`), so replicas name pages only by their hashes.
Pages offered to a peer are leased: they stay in place, unchanged except for a draft model's part, until the lease ends
or expires. Pages taken from a peer are a snapshot with the peer as its file (`SnapshotManager`): requests that begin
with it wait in their lane, running requests never wait, and pages that come late or not at all are computed.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from adapter_store.storage.snapshots import Facts, SnapshotName, digest_of
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.prefix_cache import PageChain, PrefixCache
from lorasrv.memory.snapshots import Prefix, SnapshotCounters, SnapshotManager
from lorasrv.outputs import PageLease
from lorasrv.request import Request
from lorasrv.scheduler_output import PeerSnapshot

LEASE_S = 30.0
"""Longest time, in seconds, for which a peer may read offered pages."""
MAX_LENT_SHARE = 0.25
"""Largest share of the pool's pages that all leases may hold."""
MIN_PAGES = 4
"""Fewer pages than this are computed, because a peer's answer takes milliseconds."""
PATIENCE = 2.0
"""Factor by which a peer may take longer than the estimate for computing here."""
MIN_WAIT_S, MAX_WAIT_S = 2.0, 60.0
"""Bounds of the time that a peer has, in seconds."""
PEER = "peer"
"""Owner of peers' snapshots, in place of a version."""


@dataclass(slots=True)
class PeerPageCounters:
    """Count pages lent to peers and taken from them."""

    lent_pages: int = 0
    # Offers that were not made, by reason.
    not_lent: Counter[str] = field(default_factory=Counter)
    taken: SnapshotCounters = field(default_factory=SnapshotCounters)


class PeerPages:
    """Own the leases of pages, and decide what is taken from peers. Mutated by the engine thread only.

    Args:
        facts: all that keys and values depend on besides adapter and tokens; None: nothing is exchanged.
        snapshots: restores the pages taken from peers.
        num_pages: pages of the pool.
        clock: returns seconds.
    """

    def __init__(
        self,
        facts: Facts | None,
        kv: KVCacheManager,
        prefixes: PrefixCache | None,
        snapshots: SnapshotManager,
        costs: CostModel,
        num_pages: int,
        clock: Callable[[], float],
    ) -> None:
        self.facts = None if prefixes is None else facts
        self._kv, self._prefixes, self._snapshots = kv, prefixes, snapshots
        self._costs, self._clock = costs, clock
        self._max_lent = int(MAX_LENT_SHARE * num_pages)
        self._until_s: dict[str, float] = {}
        self.counters = PeerPageCounters()

    @property
    def num_leases(self) -> int:
        """Return the number of leases that hold pages."""
        return len(self._until_s)

    # Lending.

    def offer(self, digests: Sequence[bytes]) -> PageLease:
        """Lease the cached pages of these hashes, up to the first that is missing; none if the first hash is missing,
        or if leases hold too many pages already.
        """
        self.expire()
        lease = secrets.token_hex(16)
        room = self._max_lent - sum(len(self._kv.lent(held)) for held in self._until_s)
        count = self._kv.lend(lease, digests[: max(0, room)])
        if not count:
            self.counters.not_lent["missing" if room > 0 else "busy"] += 1
            return PageLease(lease, (), self._clock())
        self._until_s[lease] = self._clock() + LEASE_S
        self.counters.lent_pages += count
        return PageLease(lease, self._kv.lent(lease), self._until_s[lease])

    def end(self, lease: str) -> None:
        """End a lease; do nothing if it has ended."""
        if self._until_s.pop(lease, None) is not None:
            self._kv.end_lease(lease)

    def expire(self) -> None:
        """End the expired leases."""
        now = self._clock()
        for lease in [lease for lease, until_s in self._until_s.items() if until_s <= now]:
            self.end(lease)

    def wake_s(self) -> float | None:
        """Return when the next lease expires; None without leases."""
        return min(self._until_s.values(), default=None)

    def check_integrity(self) -> None:
        """Compare leases with the pages that they hold.

        Raises:
            AssertionError: pages are lent without a lease, a lease has no pages, or too many are lent.
        """
        assert self._until_s.keys() == set(self._kv.leases()), "leases and lent pages differ"
        held = [page for lease in self._until_s for page in self._kv.lent(lease)]
        assert len(held) <= self._max_lent, "leases hold too many pages"
        assert all(page in self._lending_cache for page in held), "a lent page is not in the prefix cache"

    @property
    def _lending_cache(self) -> PrefixCache:
        assert self._prefixes is not None
        return self._prefixes

    # Taking.

    def on_arrival(self, request: Request) -> None:
        """Begin to take the pages of a new request's prompt from the peer that it names, or note that they are already
        on their way."""
        message = request.message
        if self.facts is None or message.peer is None or message.fork_of is not None:
            return
        if message.kv_policy is not None or request.fell_back or message.active_from:
            return
        digests = self._missing(request)
        if len(digests) < MIN_PAGES:
            return
        first = self._num_whole(request) - len(digests)
        facts = {"peer": message.peer.url, "last": digests[-1].hex(), "first": first}
        compute_s = self._costs.recompute_s(len(digests) * self._kv.page_size)
        wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, PATIENCE * compute_s))
        name = SnapshotName(PEER, digest_of(facts))
        tokens = tuple(request.token_ids[: (first + len(digests)) * self._kv.page_size])
        wanted = PeerSnapshot(name, message.peer, self.facts, digests, first, tokens, message, wait_s)
        self._snapshots.restore(request, Prefix(wanted, request.home_key, digests), self.counters.taken)

    def _missing(self, request: Request) -> tuple[bytes, ...]:
        """Return the hashes of the prompt's full pages after those in the prefix cache."""
        message = request.message
        chain = PageChain.of(self._kv.page_size, request.adapter_key, message.cache_salt, prefix=message.prefix)
        hashes = tuple(chain.hash(request.token_ids, number) for number in range(self._num_whole(request)))
        return hashes[_num_leading(self._lending_cache.page_of(digest) is not None for digest in hashes) :]

    def _num_whole(self, request: Request) -> int:
        """Return how many of the prompt's first pages can be taken: the last token is computed here for its logits."""
        return min(request.num_reusable_tokens, request.num_tokens - 1) // self._kv.page_size


def _num_leading(are_there: Iterable[bool]) -> int:
    count = 0
    for is_there in are_there:
        if not is_there:
            break
        count += 1
    return count
