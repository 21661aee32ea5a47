"""Weights that were uploaded, or are being uploaded, and that no version refers to yet.

A byte quota counts weights that versions refer to. A client that uploads without registering would evade it until the
weights are removed as orphans, after at most a day. Pending uploads therefore have their own limit of the same size.

The uploader of pending weights is kept only in memory, and for as long as orphans are kept: the lifetime of an upload
must not reveal whether another principal has the same weights. A principal whose upload was forgotten sends it again.
Uploads are counted: weights that were sent twice survive if one of the two registrations fails.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from adapter_store.errors import QuotaExceeded
from adapter_store.quota import ANONYMOUS
from adapter_store.storage.blobs import REGISTRATION_S, UNREFERENCED_BLOB_AGE_S, BlobDirectory, BlobUpload
from adapter_store.storage.unreferenced_blobs import UnreferencedBlobs

MAX_REMEMBERED = 100_000
"""Most uploads whose uploader is remembered."""


@dataclass(frozen=True, slots=True)
class Uploader:
    """Identify a principal that uploads.

    `max_bytes` limits its bytes without a version. If `is_known`, existing weights may be sent again even if the store
    is full; to other principals, that would reveal that the weights exist.
    """

    principal: str = ANONYMOUS
    max_bytes: int | None = None
    is_known: bool = True


ANONYMOUS_UPLOADER = Uploader()


@dataclass(frozen=True, slots=True)
class _Sent:
    """Record that a principal sent weights `times` times, last at `at_s`."""

    length: int
    at_s: float
    times: int = 1


class PendingUploads:
    """Start uploads and limit their bytes. Safe to use from many threads.

    Args:
        blobs: the weights.
        unreferenced: the bytes of those that no content refers to.
        on_stored: called with the digest of every completed upload.
    """

    def __init__(self, blobs: BlobDirectory, unreferenced: UnreferencedBlobs, on_stored: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._blobs = blobs
        self._unreferenced = unreferenced
        self._on_stored = on_stored
        self._sent: dict[tuple[str, str], _Sent] = {}
        self._awaited: Counter[str] = Counter()
        self._in_progress: list[tuple[str, BlobUpload]] = []

    def open(self, digest: str, length: int, max_bytes: int | None, uploader: Uploader) -> BlobUpload:
        """Start an upload; existing weights may always be sent again if the uploader may know them.

        Raises:
            QuotaExceeded: the bytes without a version would exceed `max_bytes` in total, or the uploader's limit.
            StoreFull, StoreUnusable: the disk refused.
        """
        # Concurrent uploads must count each other.
        with self._lock:
            if not (uploader.is_known and self._blobs.exists(digest)):
                self._check(length, max_bytes, uploader)
            upload = BlobUpload(self._blobs, digest, length, partial(self._stored, uploader.principal, length))
            self._in_progress = [one for one in self._in_progress if not one[1].is_closed]
            self._in_progress.append((uploader.principal, upload))
            return upload

    def has_uploaded(self, principal: str, digest: str) -> bool:
        """Return whether a principal has uploaded these weights and not yet registered them."""
        with self._lock:
            return (principal, digest) in self._sent_lately()

    def is_pending(self, digest: str) -> bool:
        """Return whether an upload of these weights is in progress or not registered yet.

        Takes no lock: the caller holds the store's lock, and a thread that waits for it may hold this object's lock.
        """
        return self._awaited[digest] > 0 or any(digest == other for other, _ in self._blobs.in_progress())

    def forget_above(self, max_bytes: int) -> None:
        """Forget the oldest uploads until the rest has at most `max_bytes`, but none that may still be registered."""
        last_s = time.monotonic() - REGISTRATION_S
        with self._lock:
            left = sum(one.length for one in self._sent_lately().values())
            for what, one in list(self._sent.items()):
                if left <= max_bytes or one.at_s > last_s:
                    break
                self._forget(what)
                left -= one.length

    @contextlib.contextmanager
    def using(self, principal: str, digest: str) -> Iterator[None]:
        """Wrap a registration: after it, successful or not, one upload of the weights is no longer pending."""
        try:
            yield
        finally:
            with self._lock:
                sent = self._sent.get((principal, digest))
                if sent is not None and sent.times > 1:
                    # Replaced in place: the dictionary is ordered by the time of the last upload.
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
        """Return the uploads, oldest first, after dropping those older than orphans are kept."""
        oldest_s = time.monotonic() - UNREFERENCED_BLOB_AGE_S
        while self._sent and next(iter(self._sent.values())).at_s < oldest_s:
            self._forget(next(iter(self._sent)))
        return self._sent

    def _check(self, length: int, max_bytes: int | None, uploader: Uploader) -> None:
        if max_bytes is not None:
            sent = sum(length for _, length in self._blobs.in_progress()) + self._unreferenced.num_bytes
            _refuse_above("store_bytes", sent, length, max_bytes)
        if uploader.max_bytes is not None:
            sent = sum(
                upload.length
                for principal, upload in self._in_progress
                if principal == uploader.principal and not upload.is_closed
            )
            sent += sum(
                one.length for (principal, _), one in self._sent_lately().items() if principal == uploader.principal
            )
            _refuse_above("max_stored_bytes", sent, length, uploader.max_bytes)


def _refuse_above(quota: str, sent: int, length: int, max_bytes: int) -> None:
    if sent + length > max_bytes:
        what = "bytes of weights without a version"
        raise QuotaExceeded(quota, what, used=sent, wanted=length, allowed=max_bytes)
