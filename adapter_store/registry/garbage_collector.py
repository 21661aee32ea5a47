"""Garbage collection of an open store: contents that no version refers to, and weights that no content refers to."""

import threading
from collections.abc import Callable

from adapter_store.registry.index import Index
from adapter_store.storage.blobs import (
    REGISTRATION_S,
    UNREFERENCED_BLOB_AGE_S,
    UNREFERENCED_BYTES,
    BlobDirectory,
    SweepSummary,
)
from adapter_store.storage.leases import BlobLeases
from adapter_store.storage.pending_uploads import PendingUploads
from adapter_store.storage.quarantine import Quarantine
from adapter_store.storage.refcounts import ContentRefcounts
from adapter_store.storage.unreferenced_blobs import UnreferencedBlobs


class GarbageCollector:
    """Remove contents and weights that are no longer needed. Safe to use from many threads.

    Args:
        lock: the store's lock.
        index: the store's index.
        blobs: the weights.
        refcounts: tells which contents are held.
        leases: tells which weights are being registered.
        pending_uploads: tells which weights may still be registered.
        unreferenced: sums the bytes of weights that no content refers to.
        quarantine: forgets contents that are removed.
        check_open: raises StoreUnusable once the store is closed.
    """

    def __init__(
        self,
        lock: threading.RLock,
        index: Index,
        blobs: BlobDirectory,
        refcounts: ContentRefcounts,
        leases: BlobLeases,
        pending_uploads: PendingUploads,
        unreferenced: UnreferencedBlobs,
        quarantine: Quarantine,
        check_open: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._index = index
        self._blobs = blobs
        self._refcounts = refcounts
        self._leases = leases
        self._pending_uploads = pending_uploads
        self._unreferenced = unreferenced
        self._quarantine = quarantine
        self._check_open = check_open

    def collect(self) -> int:
        """Remove contents that no version refers to and nothing holds, with their weights; return how many.

        Called by each deletion; contents held at that time are removed by a later call.
        """
        with self._lock:
            self._check_open()
            deleted = self._refcounts.mark_deleted(self._index.unreferenced_contents())
            if deleted:
                try:
                    unused = self._index.delete_contents(deleted)
                except BaseException:
                    self._refcounts.add(deleted)
                    raise
                self._leases.remove_unused(sorted(unused))
                self._quarantine.forget(deleted)
            return len(deleted)

    def remove_orphans(
        self, age_s: float = UNREFERENCED_BLOB_AGE_S, max_bytes: int = UNREFERENCED_BYTES
    ) -> SweepSummary:
        """Remove weights that nothing refers to: those uploaded more than `age_s` seconds ago, then the oldest that are
        not about to be registered, until the rest takes at most `max_bytes`.

        Raises:
            StoreUnusable: the disk refused; the next call continues.
        """
        # Requests wait for the lock, so thousands of files are examined without it; few of them are removed.
        files = self._blobs.oldest_first()
        self._pending_uploads.forget_above(max_bytes)
        with self._lock:
            self._check_open()
            self._index.discard_failed_commit()
            needed = self._index.referenced_digests() | self._leases.leased()
            orphans = [file for file in files if file.name not in needed]
            left, doomed = sum(file.nbytes for file in orphans), set()
            for file in orphans:
                too_many = left > max_bytes and not self._pending_uploads.is_pending(file.name)
                if file.age_s > (REGISTRATION_S if too_many else age_s):
                    doomed.add(file.name)
                    left -= file.nbytes
            try:
                return self._blobs.remove_old(doomed, min(age_s, REGISTRATION_S))
            finally:
                self._unreferenced.recount(doomed)

    def held_digests(self) -> set[str]:
        """Return the digests of the weights that something holds."""
        with self._lock:
            contents = [self._index.content(key) for key in self._refcounts.held()]
            return {content.weights_digest for content in contents if content is not None}
