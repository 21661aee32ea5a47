"""Follow a store in the same process: its pages by a call, its weights by an origin that breaks as a test says."""

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
    # Connections break behind the last byte, too.
    ends_badly: bool = False
    # Bytes after which connections break, one after another.
    breaks: list[int] = field(default_factory=list)
    # Positions whose byte is another one in the next fetches, one after another.
    flips: list[int] = field(default_factory=list)
    # Length that it says weights have; None: their own.
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
    """Follow to the end, and return the ids that looked different."""
    changed: set[str] = set()
    while True:
        page = owner.feed.changes(follower.feed.position(), limit)
        # As it travels.
        changed |= follower.follow(type(page).from_dict(page.to_dict())).ids
        if page.is_last:
            return changed


def shown(store: AdapterStore) -> dict[str, Any]:
    """Return all that a store tells about its ids."""
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
