"""Leases on weights that are being registered, so that cleanup does not remove them meanwhile.

The last lease to end removes the weights if no version refers to them and no other upload of them is pending.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from adapter_store.errors import BlobNotFound, StoreFull, StoreUnusable
from adapter_store.storage.blobs import BlobDirectory
from adapter_store.storage.pending_uploads import PendingUploads
from adapter_store.storage.unreferenced_blobs import UnreferencedBlobs


class BlobLeases:
    """Count leases by digest.

    Args:
        lock: the store's lock.
        blobs: the weights.
        check_open: raises StoreUnusable once the store is closed.
        is_referenced: returns whether a content refers to a digest.
        pending_uploads: tells which weights still have a pending upload.
        unreferenced: sums the bytes of weights that no content refers to.
    """

    def __init__(
        self,
        lock: threading.RLock,
        blobs: BlobDirectory,
        check_open: Callable[[], None],
        is_referenced: Callable[[str], bool],
        pending_uploads: PendingUploads,
        unreferenced: UnreferencedBlobs,
    ) -> None:
        self._lock = lock
        self._blobs = blobs
        self._check_open = check_open
        self._is_referenced = is_referenced
        self._pending_uploads = pending_uploads
        self._unreferenced = unreferenced
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def lease(self, digest: str, is_known: bool = True) -> Iterator[None]:
        """Keep a blob during the `with` block; when the last lease ends, remove it if nothing needs it.

        Raises:
            BlobNotFound: it does not exist, or the caller must not learn that it does (`is_known` is False).
        """
        with self._lock:
            self._check_open()
            if not self._blobs.exists(digest) or not is_known:
                raise BlobNotFound(digest)
            self._counts[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[digest] -= 1
                self.remove_unused((digest,))

    def leased(self) -> set[str]:
        """Return the digests under lease. The caller holds the store's lock."""
        return {digest for digest, count in self._counts.items() if count}

    def remove_unused(self, digests: Collection[str]) -> None:
        """Remove the blobs among these that nothing needs. The caller holds the store's lock."""
        unused = [digest for digest in digests if not self._counts[digest]]
        for digest in unused:
            del self._counts[digest]
        # A blob that cannot be removed now is removed when the store is next opened. This error must not hide why a
        # registration failed. After `close`, the folder may belong to another server.
        with contextlib.suppress(StoreUnusable, StoreFull):
            self._check_open()
            try:
                self._blobs.remove(
                    [digest for digest in unused if not self._is_referenced(digest)], self._pending_uploads.is_pending
                )
            finally:
                self._unreferenced.recount(digests)
