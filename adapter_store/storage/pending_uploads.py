"""Weights that were sent, or are being sent, and that no version names yet: how many bytes of them there may be, and
who has sent which.

A quota of bytes counts what versions name. Whoever sends and never registers would pass it, until the weights are
removed as orphans a day later: so what is sent has as much room once more, and no more than that.

Who sent what is kept in memory only, and as long as the weights would be if nobody else had them: whether somebody has
is not to be told from how long one's own upload is good for. Whoever is forgotten sends the same bytes again. But whose
upload was taken finds it there: weights that were sent twice stay when one of the two comes to nothing.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from adapter_store.errors import QuotaExceeded
from adapter_store.quota import ANONYMOUS
from adapter_store.storage.blobs import UNREFERENCED_BLOB_AGE_S, BlobDirectory, BlobUpload

MAX_REMEMBERED = 100_000
"""Uploads of which is known who sent them."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends weights. `max_bytes`: so many of its own may be without a version. Weights that are there already may
    be sent once more, however full the store is, by whom `is_known`: to others that would tell that they are."""

    principal: str = ANONYMOUS
    max_bytes: int | None = None
    is_known: bool = True


ANYBODY = Sender()


@dataclass(frozen=True, slots=True)
class _Sent:
    """Weights that a principal has sent so many `times`, the last time at `at_s`."""

    length: int
    at_s: float
    times: int = 1


class PendingUploads:
    """Begins uploads, from many threads.

    Args:
        referenced: digests that contents name.
        on_stored: told the digest of every upload that is complete.
    """

    def __init__(
        self, blobs: BlobDirectory, referenced: Callable[[], Collection[str]], on_stored: Callable[[str], None]
    ) -> None:
        self._lock = threading.Lock()
        self._blobs = blobs
        self._referenced = referenced
        self._on_stored = on_stored
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._awaited: Counter[str] = Counter()
        self._under_way: dict[str, list[BlobUpload]] = {}

    def open(self, digest: str, length: int, max_bytes: int | None, sender: Sender) -> BlobUpload:
        """Begin an upload; what is there already may always be sent once more.

        Raises:
            QuotaExceeded: there would be more than `max_bytes` without a version, or more than the sender may have.
            StoreFull, StoreUnusable: the disk refused.
        """
        # Of several at once each must see the others.
        with self._lock:
            if not (sender.is_known and self._blobs.exists(digest)):
                self._check(length, max_bytes, sender)
            upload = BlobUpload(self._blobs, digest, length, partial(self._stored, sender.principal, length))
            self._under_way[sender.principal] = [*self._by(sender.principal), upload]
            return upload

    def has_sent(self, principal: str, digest: str) -> bool:
        """Whether a principal has sent these weights, as a whole, and not registered them since."""
        with self._lock:
            return (principal, digest) in self._sent_lately()

    def is_awaited(self, digest: str) -> bool:
        """Whether somebody has sent these weights, or is sending them, who has not registered them.

        Takes no lock: it is asked under the store's, which who holds this one's may wait for.
        """
        return self._awaited[digest] > 0 or any(digest == other for other, _ in self._blobs.under_way())

    @contextlib.contextmanager
    def using(self, principal: str, digest: str) -> Iterator[None]:
        """Weights are being registered, and one upload of them is forgotten then: a version names them, or nobody."""
        try:
            yield
        finally:
            with self._lock:
                sent = self._sent.get((principal, digest))
                if sent is not None and sent.times > 1:
                    # In its place: they are in the order of their last upload.
                    self._sent[principal, digest] = replace(sent, times=sent.times - 1)
                else:
                    self._forget((principal, digest))

    def _stored(self, principal: str, length: int, digest: str) -> None:
        with self._lock:
            before = self._forget((principal, digest))
            times = 1 if before is None else before.times + 1
            self._remember((principal, digest), _Sent(length, time.monotonic(), times))
            if len(self._sent) > MAX_REMEMBERED:
                self._forget(next(iter(self._sent)))
        self._on_stored(digest)

    def _remember(self, what: tuple[str, str], sent: _Sent) -> None:
        self._sent[what] = sent
        self._awaited[what[1]] += 1

    def _forget(self, what: tuple[str, str]) -> _Sent | None:
        sent = self._sent.pop(what, None)
        if sent is not None:
            self._awaited[what[1]] -= 1
            if not self._awaited[what[1]]:
                del self._awaited[what[1]]
        return sent

    def _sent_lately(self) -> dict[tuple[str, str], _Sent]:
        """What was sent, oldest first."""
        oldest_s = time.monotonic() - UNREFERENCED_BLOB_AGE_S
        while self._sent and next(iter(self._sent.values())).at_s < oldest_s:
            self._forget(next(iter(self._sent)))
        return self._sent

    def _by(self, principal: str) -> list[BlobUpload]:
        """Uploads of a principal that have not ended."""
        return [upload for upload in self._under_way.pop(principal, ()) if not upload.is_over]

    def _check(self, length: int, max_bytes: int | None, sender: Sender) -> None:
        if max_bytes is not None:
            sizes = self._blobs.sizes()
            sent = sum(length for _, length in self._blobs.under_way()) + sum(
                sizes[name] for name in sizes.keys() - self._referenced()
            )
            _refuse_above("store_bytes", sent, length, max_bytes)
        if sender.max_bytes is not None:
            under_way = self._under_way[sender.principal] = self._by(sender.principal)
            sent = sum(upload.length for upload in under_way)
            sent += sum(one.length for (who, _), one in self._sent_lately().items() if who == sender.principal)
            _refuse_above("max_stored_bytes", sent, length, sender.max_bytes)


def _refuse_above(quota: str, sent: int, length: int, max_bytes: int) -> None:
    if sent + length > max_bytes:
        what = "bytes of weights that no version names yet"
        raise QuotaExceeded(quota, what, used=sent, wanted=length, allowed=max_bytes)
