"""Weights that somebody is about to register: nobody removes them meanwhile, and the last to leave does if it must,
unless somebody else has sent them too.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from adapter_store.errors import BlobNotFound, StoreFull, StoreUnusable
from adapter_store.storage.blobs import BlobDirectory
from adapter_store.storage.pending_uploads import PendingUploads


class BlobLeases:
    """Counts by digest.

    Args:
        lock: the store's.
        check_open: raises StoreUnusable once the store is closed.
        is_referenced: whether a content names a digest.
        staging: who has sent what.
    """

    def __init__(
        self,
        lock: threading.RLock,
        blobs: BlobDirectory,
        check_open: Callable[[], None],
        is_referenced: Callable[[str], bool],
        staging: PendingUploads,
    ) -> None:
        self._lock = lock
        self._blobs = blobs
        self._check_open = check_open
        self._is_referenced = is_referenced
        self._staging = staging
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def lease(self, digest: str, is_known: bool = True) -> Iterator[None]:
        """Nobody removes the blob inside; the last to leave does, if no version names it.

        Raises: BlobNotFound: it is not there, or not for whoever asks.
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
        """Under the store's lock: what somebody is about to register."""
        return {digest for digest, count in self._counts.items() if count}

    def remove_unused(self, digests: Collection[str]) -> None:
        """Under the store's lock: remove those of these blobs that nobody needs."""
        unused = [digest for digest in digests if not self._counts[digest]]
        for digest in unused:
            del self._counts[digest]
        # Litter that cannot be removed now goes when the store opens next; it must not hide why a registration failed,
        # and once the store is closed it is another server's.
        with contextlib.suppress(StoreUnusable, StoreFull):
            self._check_open()
            self._blobs.remove(
                [digest for digest in unused if not self._is_referenced(digest)], self._staging.is_awaited
            )
