"""Replication of names between stores: the changes that an owner sends, and how a follower applies them."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from adapter_store.errors import StoreUnusable
from adapter_store.registry.base_identity import BaseIdentity, check_same_base
from adapter_store.registry.feed import PAGE_IDS
from adapter_store.registry.feed_page import CONTENTS, WRONG, FeedPage, Position
from adapter_store.registry.index import Index
from adapter_store.registry.names import Names
from adapter_store.registry.records import AdapterRecord
from adapter_store.spec import AdapterId, AdapterKey
from adapter_store.storage.refcounts import ContentRefcounts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Followed:
    """Describe what a page changed: the changed ids, their versions that are gone, and the contents of these versions
    that no version refers to any more.
    """

    ids: frozenset[AdapterId] = frozenset()
    gone: Mapping[AdapterId, frozenset[int]] = field(default_factory=dict)
    unnamed: frozenset[AdapterKey] = frozenset()


class NameFeed:
    """Return pages of changes, or apply them. Safe to use from many threads.

    Args:
        lock: the store's lock.
        index: the store's index.
        names: the name table that resolves references.
        refcounts: the contents that may be held.
        identity: this store's base.
        reserved: ids that no adapter may have; adapters of the origin with such ids are hidden.
        follows: address of the store that this one follows; None if it owns its names.
        check_open: raises StoreUnusable once the store is closed.

    Raises:
        StoreUnusable: the index is a follower's where an owner's is needed, or the reverse.
    """

    def __init__(
        self,
        lock: threading.RLock,
        index: Index,
        names: Names,
        refcounts: ContentRefcounts,
        identity: BaseIdentity,
        reserved: Collection[str],
        follows: str | None,
        check_open: Callable[[], None],
    ) -> None:
        self._lock, self._index, self._names, self._refcounts = lock, index, names, refcounts
        self._identity, self._reserved, self._check_open = identity, frozenset(reserved), check_open
        self.follows = follows
        # In a follower: the revision that its names show, and the hidden ids of the origin (reserved here).
        self._shown = -1
        self._hidden: set[str] = set()
        _check_side(index, follows is not None)

    @property
    def revision(self) -> int:
        """Return the revision that the names show; in a follower the origin's, or -1 until the names are complete."""
        return self._index.revision if self.follows is None else self._shown

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a function after every change, in the thread that made it; return a function that stops this."""
        return self._index.listen(listener)

    def changes(self, after: Position | None, limit: int = PAGE_IDS) -> FeedPage:
        """Return the next changes after a position (`registry/feed.py`)."""
        with self._lock:
            self._check_open()
            return self._index.changes(after, limit)

    def head(self) -> Position:
        """Return the position of the last change."""
        with self._lock:
            self._check_open()
            return self._index.head()

    def position(self) -> Position | None:
        """Return the position that this follower has reached; None if it has no page yet."""
        with self._lock:
            self._check_open()
            return self._index.position()

    def take(self, page: FeedPage) -> Followed:
        """Apply a page, completely or not at all. The caller holds the store's lock.

        Names change all at once, with the last page: until then, the pages received may be of different ages.

        Raises:
            StoreUnusable: the adapters are for another base, or the page's rows are inconsistent.
            StoreFull: the disk is full. After any error nothing has changed.
        """
        self._check_open()
        check_same_base(self._identity, page.base)
        shown = -1 if page.is_first else self._shown
        changed = self._follow(page, shown)
        # Before a name resolves to these contents.
        self._refcounts.add([AdapterKey(key) for key, *_ in page.rows[CONTENTS]])
        self._shown = shown
        if not page.is_last:
            return Followed()
        changed = self._without_reserved(changed)
        if self._shown < 0:
            # The feed began again, and its pages do not list ids that are gone.
            changed |= dict.fromkeys(self._names.records.keys() - changed.keys())
        before, gone = self._names.records, self._gone(changed)
        self._names.update(changed)
        self._shown = page.position.revision
        keys = {v.key for name, left in gone.items() for v in before[name].versions if v.version in left}
        unnamed = frozenset(key for key in keys if key is not None and not self._index.is_named(key))
        return Followed(frozenset(changed), gone, unnamed)

    def _follow(self, page: FeedPage, shown: int) -> dict[AdapterId, AdapterRecord | None]:
        """Apply a page to the index; return the ids changed since revision `shown`, or by a page that is not the last.

        They are read before the commit, because an index with unreadable rows could not be opened again.
        """
        first = min((revision for _, _, revision in page.ids), default=0)
        try:
            with self._index.following(page):
                return self._index.changed_since(shown if page.is_last else first - 1)
        except WRONG as error:
            raise StoreUnusable(f"the registry's changes cannot be read: {error!r:.300}") from None

    def _without_reserved(
        self, changed: Mapping[AdapterId, AdapterRecord | None]
    ) -> dict[AdapterId, AdapterRecord | None]:
        """Return the changes without reserved ids: the base's name always means the base."""
        held = {name for name, record in changed.items() if record is not None and name in self._reserved}
        for name in sorted(held - self._hidden):
            _LOG.warning(
                "the registry has an adapter named %r, which is the base's name here (--served-model-name): this "
                "server answers for the base by that name, and not for the adapter",
                name,
            )
        self._hidden = (self._hidden - changed.keys()) | held
        return {name: record for name, record in changed.items() if name not in self._reserved}

    def _gone(self, changed: Mapping[AdapterId, AdapterRecord | None]) -> dict[AdapterId, frozenset[int]]:
        found = {}
        for name in changed.keys() & self._names.records.keys():
            record = changed[name]
            # An origin restored from a backup may reuse version numbers.
            left = set() if record is None else {(v.version, v.key, v.persona) for v in record.versions}
            before = self._names.records[name].versions
            if gone := frozenset(v.version for v in before if (v.version, v.key, v.persona) not in left):
                found[name] = gone
        return found


def _check_side(index: Index, follows: bool) -> None:
    """Check that the index is a follower's if `follows`, else an owner's; an empty one may become a follower's."""
    if not follows and index.position() is not None:
        raise StoreUnusable("it is the cache of a server that follows a registry; a registry has its own folder")
    if follows and index.position() is None:
        if not index.is_empty():
            raise StoreUnusable("it holds adapters of its own; a server that follows a registry has its own folder")
        index.mark_followed()
