"""Snapshots: prefix pages outside the pool, either of fixed prefixes on the disk or of any prompt at a peer
(`PeerPages`). `SnapshotManager` is the only owner of their state.

A snapshot is a set of prefix pages that survive restarts and eviction. It is read into host memory while its adapter
loads and gets free pages as soon as the adapter has its own. Once filled, these pages belong to the prefix cache.
Requests that begin with the snapshot wait for this one load. If the file is damaged, the peer sends less, or no page is
free, they compute what is missing as if there were no snapshot.

A snapshot is restored if that is estimated to be faster than computing by `MIN_GAIN`. It is made at the third use of
its prefix, or when an operator asks for it; if that fails, at the sixth, the twelfth and so on. Snapshots are written
one at a time, because their pages also occupy host memory until they are on the disk.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import Facts, SnapshotName, digest_of
from lorasrv.memory.adapter_cache import Need
from lorasrv.memory.adapter_manager import AdapterManager
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.eviction import EvictionLevel, Evictor
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.prefix_cache import PrefixCache, page_hashes, root_hash
from lorasrv.request import FixedPrefix, Request
from lorasrv.scheduler_output import PeerSnapshot, SnapshotFile, SnapshotOrders

MIN_GAIN = 1.5
"""Smallest factor by which restoring must be faster than computing."""
USES = 3
"""Number of requests with a prefix after which it is kept."""
MAX_ARRIVING = 8
"""Most snapshots on their way to the pool; the prefix of a further one is computed."""
MAX_ARRIVING_BYTES = 256 << 20
"""Most host memory of several snapshots on their way to the pool."""
MAX_COUNTED = 4096
"""Most prefixes whose uses are counted."""
MAX_WANTED = 8
"""Most snapshots that wait for their pages to be computed."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Describe the pages of a prefix."""

    source: SnapshotFile | PeerSnapshot
    # Adapter whose eviction makes the pages useless.
    home: AdapterKey | None
    # Hashes of its pages.
    hashes: tuple[bytes, ...]


class _State(Enum):
    LOADING = "loading"
    ON_HOST = "on host"
    COPYING = "copying"


@dataclass(slots=True)
class SnapshotCounters:
    """Count events since the start."""

    made: int = 0
    restored: int = 0
    restored_bytes: int = 0
    # Snapshots that should have been restored or made but were not, by reason.
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Arrival:
    """Hold a snapshot on its way to the pool."""

    prefix: Prefix
    counters: SnapshotCounters
    state: _State = _State.LOADING
    # Requests that wait for it.
    requests: list[Request] = field(default_factory=list)
    # Seconds that reading it took.
    seconds: float = 0.0
    # Number of leading pages that are in host memory.
    num_loaded: int = 0
    # Places of the pages that are being filled.
    places: tuple[int, ...] = ()

    @property
    def is_from_peer(self) -> bool:
        """Return whether it comes from a peer instead of the disk."""
        return isinstance(self.prefix.source, PeerSnapshot)


class SnapshotManager:
    """Own the state of every snapshot. Mutated by the engine thread only.

    Args:
        facts: all that keys and values depend on besides their prefix; None: nothing is kept or restored.
        stored: bytes of the snapshots on the disk.
        page_bytes: bytes of a page in all slabs.
        max_bytes: most bytes of all snapshots on the disk.
    """

    def __init__(
        self,
        facts: Facts | None,
        stored: Mapping[SnapshotName, int],
        kv: KVCacheManager,
        prefixes: PrefixCache | None,
        adapters: AdapterManager,
        evictor: Evictor,
        costs: CostModel,
        page_bytes: int,
        max_bytes: int,
    ) -> None:
        self._facts = None if prefixes is None else facts
        self._stored = dict(stored)
        self._kv, self._prefixes = kv, prefixes
        self._adapters, self._evictor = adapters, evictor
        self._costs = costs
        self._page_bytes, self._max_bytes = page_bytes, max_bytes
        self._uses: OrderedDict[SnapshotName, int] = OrderedDict()
        self._arriving: dict[SnapshotName, _Arrival] = {}
        self._wanted: dict[SnapshotName, Prefix] = {}
        self._saving: set[SnapshotName] = set()
        self._loads: list[SnapshotFile | PeerSnapshot] = []
        self._cancels: list[SnapshotName] = []
        self._copies: list[tuple[SnapshotName, tuple[tuple[int, int], ...]]] = []
        self._ended: list[SnapshotName] = []
        self.counters = SnapshotCounters()

    @property
    def num_bytes(self) -> int:
        """Return the bytes on the disk."""
        return sum(self._stored.values())

    @property
    def is_on(self) -> bool:
        """Return whether snapshots are kept."""
        return self._facts is not None

    def is_arriving(self, name: SnapshotName | None) -> bool:
        """Return whether a snapshot is on its way to the pool."""
        return name in self._arriving

    def is_coming(self, name: SnapshotName) -> bool:
        """Return whether a snapshot waits for its pages, or is being written."""
        return name in self._wanted or name in self._saving

    def find(self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the tokens and bytes of a prefix's snapshot; None if there is none."""
        known = self._prefix_of(adapter, adapter, prefix, token_ids)
        if known is None or (nbytes := self._stored.get(known.source.name)) is None:
            return None
        return len(known.hashes) * self._kv.page_size, nbytes

    @property
    def has_ended(self) -> bool:
        """Return whether `take_ended` would return any snapshots."""
        return bool(self._ended)

    def take_ended(self) -> list[SnapshotName]:
        """Return the snapshots whose requests have stopped waiting since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Restoring.

    def on_arrival(self, request: Request) -> None:
        """Begin to restore the snapshot of a new request's prefix, or let the request wait for it, if that pays off."""
        message = request.message
        if message.kv_policy is not None or request.fell_back:
            return
        prefix = self._prefix_of(request.adapter_key, request.home_key, message.prefix, message.prompt_token_ids)
        if prefix is None:
            return
        name = prefix.source.name
        if message.fork_of is None:
            self._count_use(name, prefix)
        if request.snapshot is None and (name in self._arriving or (name in self._stored and self._pays_now(prefix))):
            self.restore(request, prefix, self.counters)

    def restore(self, request: Request, prefix: Prefix, counters: SnapshotCounters) -> None:
        """Begin to restore the snapshot of a new request's prefix, or let the request wait for it; do nothing if too
        many snapshots are on their way.
        """
        name = prefix.source.name
        if name not in self._arriving:
            if not self._has_room(prefix):
                counters.refused["busy"] += 1
                return
            self._arriving[name] = _Arrival(prefix, counters)
            self._loads.append(prefix.source)
        self._arriving[name].requests.append(request)
        request.snapshot = name

    def place(self, keep_free: int) -> None:
        """Take pages for the snapshots in host memory whose adapters have pages, filled or not; drop snapshots that are
        no longer needed.

        Args:
            keep_free: pages that are left free.
        """
        for arrival in [a for a in self._arriving.values() if a.is_from_peer and a.state is not _State.COPYING]:
            if all(request.status.is_finished for request in arrival.requests):
                self._drop(arrival, "unneeded")
        for arrival in [a for a in self._arriving.values() if a.state is _State.ON_HOST]:
            home = arrival.prefix.home
            if home is None or home in self._adapters.cache:
                self._place(arrival, keep_free)
            elif self._adapters.need(home) is Need.NOTHING:
                self._drop(arrival, "unneeded")

    def on_loaded(self, name: SnapshotName, seconds: float, num_pages: int | None = None) -> None:
        """Note that a snapshot is in host memory, or its first `num_pages`."""
        if name in self._cancels:
            return  # cancelled, but the loader did not know yet
        arrival = self._arriving[name]
        arrival.state, arrival.seconds = _State.ON_HOST, seconds
        arrival.num_loaded = len(arrival.prefix.hashes) if num_pages is None else num_pages

    def on_copied(self, name: SnapshotName, seconds: float) -> None:
        """Note that the pages of a snapshot are filled, and pass them to the prefix cache."""
        arrival = self._arriving[name]
        copied = len(arrival.places) * self._page_bytes
        source = arrival.prefix.source
        if isinstance(source, PeerSnapshot):
            first, size = source.first + min(arrival.places, default=0), self._kv.page_size
            for request in arrival.requests:
                request.peer_tokens = range(first * size, (first + len(arrival.places)) * size)
        else:
            self._costs.restore.observe(arrival.seconds + seconds, self._bytes_of(arrival.prefix))
        arrival.counters.restored += 1
        arrival.counters.restored_bytes += copied
        self._end(arrival, tuple(arrival.prefix.hashes[place] for place in arrival.places))

    def on_load_failed(self, name: SnapshotName, reason: str, *, is_gone: bool) -> None:
        """Note that a snapshot could not be read or copied.

        Args:
            reason: one word, for the counters.
            is_gone: whether it is no longer on the disk.
        """
        if is_gone:
            self._stored.pop(name, None)
        if name in self._cancels:
            return
        self._arriving[name].counters.refused[reason] += 1
        self._end(self._arriving[name], ())

    # Making.

    def want(
        self, adapter: AdapterKey | None, prefix: FixedPrefix, token_ids: Sequence[int]
    ) -> tuple[SnapshotName, int] | None:
        """Make a snapshot of a prefix as soon as its pages are in the prefix cache; do nothing if there is one.

        Returns: its name and number of tokens; None if nothing is kept, or the prefix has no full page or too many.
        """
        known = self._prefix_of(adapter, adapter, prefix, token_ids)
        if known is None:
            return None
        self._want(known)
        return known.source.name, len(known.hashes) * self._kv.page_size

    def on_saved(self, name: SnapshotName, nbytes: int, removed: Sequence[SnapshotName]) -> None:
        """Note that a snapshot is on the disk, and that others were removed for it."""
        if name in self._saving:  # else its version was deleted as soon as it was written
            self._saving.remove(name)
            self._stored[name] = nbytes
        self._uses.pop(name, None)
        for other in removed:
            self._stored.pop(other, None)
        self.counters.made += 1

    def on_removed(self, name: SnapshotName) -> None:
        """Note that a snapshot was removed with its version, perhaps before it is noted as saved."""
        self._saving.discard(name)
        self._stored.pop(name, None)

    def on_save_failed(self, name: SnapshotName, reason: str) -> None:
        """Note that a snapshot could not be written; `reason` is one word."""
        self._saving.discard(name)
        self.counters.refused[reason] += 1

    def take_orders(self) -> SnapshotOrders:
        """Return the new orders since the last call; cancels come before loads, loads before copies.

        Call it at the end of planning, so that pages to be saved are not taken before they are read.
        """
        loads, cancels, copies = self._loads, self._cancels, self._copies
        self._loads, self._cancels, self._copies = [], [], []
        return SnapshotOrders(tuple(loads), tuple(copies), tuple(cancels), tuple(self._saves()))

    def check_integrity(self) -> None:
        """Compare snapshots with the orders, the pages that are filled for them, and each other.

        Raises:
            AssertionError: they differ, a snapshot is in two states, or there are too many.
        """
        filling, arrivals = self._kv.filling(), self._arriving.items()
        copying = {name: len(arrival.places) for name, arrival in arrivals if arrival.state is _State.COPYING}
        assert copying == {name: len(pages) for name, pages in filling.items()}, "pages are filled for another snapshot"
        read = {page for pages in self._kv.holders().values() for page in pages}
        read.update(() if self._prefixes is None else self._prefixes.references())
        assert not any(page in read for pages in filling.values() for page in pages), (
            "a page that is being filled is read"
        )
        loads, copies = [source.name for source in self._loads], [name for name, _ in self._copies]
        loading = {name for name, arrival in arrivals if arrival.state is _State.LOADING}
        assert loading.issuperset(loads), "a load is ordered that nobody waits for"
        assert copying.keys() >= set(copies), "a copy is ordered that nobody waits for"
        assert len({*loads, *copies}) == len(loads) + len(copies), "an order is given twice"
        for name, arrival in arrivals:
            prefix, loaded = arrival.prefix, range(arrival.num_loaded)
            assert (prefix.source.name, {r.snapshot for r in arrival.requests}) == (name, {name}), "others wait for it"
            assert list(arrival.places) == sorted({*arrival.places} & {*loaded}), "pages are filled from nothing"
            assert len(loaded) <= len(prefix.hashes), "a snapshot is longer than its prefix"
            assert arrival.is_from_peer or self.is_on, "a snapshot is restored that is not kept"
        assert len(self._arriving) <= MAX_ARRIVING, "too many snapshots are on their way"
        states = (*self._stored, *self._saving, *self._wanted)
        assert len({*states}) == len(states), "a snapshot is on the disk, being written and wanted"
        assert self._uses.keys().isdisjoint(self._stored), "uses of a snapshot on the disk are counted"
        assert len(self._saving) <= 1, "snapshots are written at the same time"
        assert len(self._wanted) <= MAX_WANTED, "too many snapshots are wanted"
        assert self.is_on or not (self._saving or self._wanted or self._uses), "a snapshot is made that is not kept"

    def _saves(self) -> list[tuple[SnapshotFile, tuple[int, ...]]]:
        """Return the next wanted snapshot whose pages are cached, unless one is being written."""
        for name, prefix in self._wanted.items() if not self._saving else ():
            assert self._prefixes is not None
            if (pages := _all_pages(prefix.hashes, self._prefixes.page_of)) is not None:
                assert isinstance(prefix.source, SnapshotFile), "what a peer has is not written"
                del self._wanted[name]
                self._saving.add(name)
                return [(prefix.source, pages)]
        return []

    def _count_use(self, name: SnapshotName, prefix: Prefix) -> None:
        """Count a use of a prefix that is not on the disk, and make a snapshot after enough uses."""
        if name in self._stored:
            return
        uses = self._uses.pop(name, 0) + 1
        self._uses[name] = uses
        if len(self._uses) > MAX_COUNTED:
            self._uses.popitem(last=False)
        if uses % USES == 0 and (uses // USES).bit_count() == 1 and self._pays(len(prefix.hashes), prefix):
            self._want(prefix)

    def _want(self, prefix: Prefix) -> None:
        name = prefix.source.name
        if name in self._stored or name in self._saving:
            return
        self._wanted[name] = prefix
        if len(self._wanted) > MAX_WANTED:
            del self._wanted[next(iter(self._wanted))]
            self.counters.refused["busy"] += 1

    def _pays_now(self, prefix: Prefix) -> bool:
        """Return whether restoring a snapshot pays off after those that are being read."""
        missing = self._missing(prefix)
        if not missing:
            return False
        loading = [a.prefix for a in self._arriving.values() if a.state is _State.LOADING and not a.is_from_peer]
        if self._has_room(prefix) and not self._pays(len(missing), prefix, sum(map(self._bytes_of, loading))):
            self.counters.refused["slow"] += 1
            return False
        return True

    def _has_room(self, prefix: Prefix) -> bool:
        """Return whether one more snapshot may be on its way to the pool."""
        num_bytes = sum(self._bytes_of(arrival.prefix) for arrival in self._arriving.values()) + self._bytes_of(prefix)
        return len(self._arriving) < MAX_ARRIVING and not (self._arriving and num_bytes > MAX_ARRIVING_BYTES)

    def _pays(self, num_pages: int, prefix: Prefix, ahead: int = 0) -> bool:
        """Return whether restoring a snapshot is faster than computing `num_pages` of its pages.

        Args:
            ahead: bytes of other snapshots that are read first.
        """
        compute_s = self._costs.recompute_s(num_pages * self._kv.page_size)
        return compute_s >= MIN_GAIN * self._costs.restore_s(ahead + self._bytes_of(prefix))

    def _bytes_of(self, prefix: Prefix) -> int:
        return len(prefix.hashes) * self._page_bytes

    def _missing(self, prefix: Prefix, most: int | None = None) -> list[int]:
        """Return the places of the pages that the prefix cache lacks, among all or the first `most`."""
        assert self._prefixes is not None
        return [place for place, digest in enumerate(prefix.hashes[:most]) if self._prefixes.page_of(digest) is None]

    def _prefix_of(
        self,
        adapter: AdapterKey | None,
        home: AdapterKey | None,
        prefix: FixedPrefix | None,
        token_ids: Sequence[int],
    ) -> Prefix | None:
        """Return what is known of a prefix; None if nothing is kept, or it has no full page or too many."""
        if self._facts is None or prefix is None:
            return None
        num_pages = prefix.num_tokens // self._kv.page_size
        if not num_pages or num_pages * self._page_bytes > self._max_bytes:
            return None
        root = root_hash(adapter, prefix.salt)
        hashes = page_hashes(root, token_ids[: prefix.num_tokens], self._kv.page_size)
        facts = {**self._facts, "prefix": hashes[-1].hex(), "pages": len(hashes)}
        file = SnapshotFile(SnapshotName(prefix.owner, digest_of(facts)), facts, len(hashes))
        return Prefix(file, home, hashes)

    def _place(self, arrival: _Arrival, keep_free: int) -> None:
        name, places = arrival.prefix.source.name, tuple(self._missing(arrival.prefix, arrival.num_loaded))
        pages = None
        has_room = self._evictor.make_room(len(places) + keep_free, EvictionLevel.PREFETCH)
        # Making room may have evicted pages of this prefix.
        if has_room and places == tuple(self._missing(arrival.prefix, arrival.num_loaded)):
            pages = self._kv.begin_fill(name, len(places))
        if pages is None:
            self._drop(arrival, "no room")
            return
        arrival.state, arrival.places = _State.COPYING, places
        self._copies.append((name, tuple(zip(places, pages, strict=True))))

    def _drop(self, arrival: _Arrival, reason: str) -> None:
        """Cancel a load or release a host copy."""
        arrival.counters.refused[reason] += 1
        if arrival.prefix.source in self._loads:
            self._loads.remove(arrival.prefix.source)
        else:
            self._cancels.append(arrival.prefix.source.name)
        self._end(arrival, ())

    def _end(self, arrival: _Arrival, hashes: Sequence[bytes]) -> None:
        name, home = arrival.prefix.source.name, arrival.prefix.home
        del self._arriving[name]
        self._ended.append(name)
        if arrival.state is _State.COPYING:
            is_resident = home is None or self._adapters.is_resident(home)
            self._kv.end_fill(name, hashes, home, is_resident=is_resident)


def _all_pages(hashes: Sequence[bytes], page_of: Callable[[bytes], int | None]) -> tuple[int, ...] | None:
    """Return the pages of all hashes; None if one is missing."""
    pages = [page for digest in reversed(hashes) if (page := page_of(digest)) is not None]
    return tuple(reversed(pages)) if len(pages) == len(hashes) else None
