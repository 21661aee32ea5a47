"""A store that follows another in the same process: it gets pages by calls, and weights from an origin with scripted
faults."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from adapter_store.errors import BlobNotFound, OriginUnreachable
from adapter_store.registry.feed import PAGE_IDS
from adapter_store.store import AdapterStore

PIECE = 64


@dataclass
class NearOrigin:
    """Give the weights of a store of the same process."""

    of: Callable[[], AdapterStore]
    address: str = "http://registry.test:8000"
    is_reachable: bool = True
    # Whether connections also break after the last byte.
    ends_badly: bool = False
    # Bytes after which connections break, one entry per connection.
    breaks: list[int] = field(default_factory=list)
    # Positions at which the next fetches have a wrong byte, one entry per fetch.
    flips: list[int] = field(default_factory=list)
    # Announced length of weights; None: the true length.
    announced: int | None = None
    # (digest, start) of every fetch.
    fetched: list[tuple[str, int]] = field(default_factory=list)

    def check(self) -> None:
        if not self.is_reachable:
            raise OriginUnreachable("the registry does not answer")

    @contextlib.contextmanager
    def fetch(self, digest: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        self.check()
        self.fetched.append((digest, start))
        path = self.of()._blobs.path(digest)
        if not path.is_file():
            raise BlobNotFound(digest)
        data = bytearray(path.read_bytes())
        if self.flips:
            data[self.flips.pop(0)] ^= 1
        end = self.breaks.pop(0) if self.breaks else len(data)
        yield self.announced or len(data), self._pieces(bytes(data), start, end)

    def _pieces(self, data: bytes, start: int, end: int) -> Iterator[bytes]:
        for at in range(start, min(end, len(data)), PIECE):
            yield data[at : min(at + PIECE, end)]
        if end < len(data) or self.ends_badly:
            raise OriginUnreachable("the connection broke")


def catch_up(follower: AdapterStore, owner: AdapterStore, limit: int = PAGE_IDS) -> set[str]:
    """Follow to the end, and return the ids that changed."""
    changed: set[str] = set()
    while True:
        page = owner.feed.changes(follower.feed.position(), limit)
        # Serialized, as on the network.
        changed |= follower.follow(type(page).from_dict(page.to_dict())).ids
        if page.is_last:
            return changed


def shown(store: AdapterStore) -> dict[str, Any]:
    """Return everything that a store shows about its ids."""
    history = store.version_history
    found: dict[str, Any] = {}
    for record in store.list_adapters():
        for version in record.versions:
            ref = record.ref(version.version)
            report = None if version.key is None else history.report(ref)
            defaults = history.defaults(ref) if version.persona else None
            found[f"{record.adapter_id}@{version.version}"] = (
                *(report, defaults, history.owner(ref), history.verdict(ref)),
                None if version.key is None else store.spec(version.key),
            )
        found[record.adapter_id] = record
    return found
