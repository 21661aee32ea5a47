"""Weights of a follower: a bounded cache of blobs that another store has, fetched by digest when they are first opened.

A fetch is an upload to this folder: it becomes visible when all bytes have come and match the digest, so a crash leaves
a whole blob or none. A connection that breaks is continued where it broke. Held blobs stay; of the others the least
recently opened go first.
"""

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from adapter_store.errors import (
    AdapterCorrupt,
    BlobLengthMismatch,
    BlobNotFound,
    CacheFull,
    DigestMismatch,
    OriginUnreachable,
    StoreFull,
)  # fmt: skip
from adapter_store.storage.blobs import BlobDirectory, BlobUpload

MAX_FETCHES = 2
"""Times that a blob is fetched whole before it counts as damaged."""
MAX_STALLS = 3
"""Times that a connection may break without having brought a byte."""
_LOG = logging.getLogger(__name__)


class Origin(Protocol):
    """Reach the store that this one follows. Any thread may call, several at a time."""

    @property
    def address(self) -> str:
        """Return where changes are to be sent."""

    def check(self) -> None:
        """Raise OriginUnreachable if it was not reached when it was last tried."""

    def fetch(self, digest: str, start: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Return the length of a blob, and its bytes from `start` on.

        Raises:
            BlobNotFound: it has none.
            OriginUnreachable: it does not answer, or stopped while the bytes were read.
        """


class BlobCache(BlobDirectory):
    """Open blobs, fetching those that are missing.

    Args:
        root: the store's folder.
        origin: where blobs come from.
        max_bytes: most bytes in the folder.
        held: returns the digests of blobs that must stay.
    """

    def __init__(self, root: Path, origin: Origin, max_bytes: int, held: Callable[[], Collection[str]]) -> None:
        super().__init__(root)
        self._origin = origin
        self._max_bytes = max_bytes
        self._held = held
        # Taken for a moment, never during a fetch.
        self._lock = threading.Lock()
        self._fetches: dict[str, threading.Lock] = {}
        self._waiting: Counter[str] = Counter()
        # Bytes of the blobs that are on their way.
        self._coming: dict[str, int] = {}

    def open(self, digest: str) -> BufferedReader:
        """Open a blob for reading, fetching it first if it is not here.

        Raises:
            BlobNotFound: the origin has none.
            AdapterCorrupt: what came does not match the digest, twice.
            OriginUnreachable: it cannot be fetched now.
            CacheFull: it has no room beside those that are held.
        """
        with self._alone(digest):
            try:
                file = super().open(digest)
            except BlobNotFound:
                self._fetch(digest)
                file = super().open(digest)
        with contextlib.suppress(OSError):
            # The time of the last use, over restarts too.
            os.utime(self.path(digest))
        return file

    def drop_damaged(self, digest: str) -> bool:
        """Remove a copy that was read back damaged, so that the next open fetches it; return whether there was one."""
        with self._alone(digest):
            is_here = self.exists(digest)
            self.remove([digest])
            return is_here

    @contextlib.contextmanager
    def _alone(self, digest: str) -> Iterator[None]:
        """Let one thread at a time look for a blob; it is not evicted meanwhile."""
        with self._lock:
            self._waiting[digest] += 1
            fetching = self._fetches.setdefault(digest, threading.Lock())
        try:
            with fetching:
                yield
        finally:
            with self._lock:
                self._waiting[digest] -= 1
                if not self._waiting[digest]:
                    del self._waiting[digest], self._fetches[digest]

    def _fetch(self, digest: str) -> None:
        for _ in range(MAX_FETCHES):
            try:
                return self._fetch_once(digest)
            except (DigestMismatch, BlobLengthMismatch) as error:
                _LOG.warning("weights sha256:%s came damaged from %s: %s", digest[:12], self._origin.address, error)
            except StoreFull as error:
                raise CacheFull(f"no room on this replica's disk for weights sha256:{digest[:12]}") from error
            finally:
                with self._lock:
                    self._coming.pop(digest, None)
        raise AdapterCorrupt(
            f"weights sha256:{digest[:12]} come damaged from the registry, {MAX_FETCHES} times now; upload the same "
            "file again"
        )

    def _fetch_once(self, digest: str) -> None:
        with contextlib.ExitStack() as opened:
            upload: BlobUpload | None = None
            received = stalls = 0
            while True:
                before = received
                try:
                    with self._origin.fetch(digest, received) as (length, chunks):
                        if upload is None:
                            self._make_room(digest, length)
                            upload = opened.enter_context(BlobUpload(self, digest, length))
                        for chunk in chunks:
                            upload.write(chunk)
                            received += len(chunk)
                    return upload.commit()
                except OriginUnreachable:
                    stalls = stalls + 1 if received == before else 0
                    if stalls >= MAX_STALLS or not received:
                        raise

    def _make_room(self, digest: str, length: int) -> None:
        with self._lock:
            files = self.oldest_first()
            over = sum(file.nbytes for file in files) + sum(self._coming.values()) + length - self._max_bytes
            evicted = []
            if over > 0:
                kept = {*self._held(), *self._waiting}
                for file in files:
                    if over > 0 and file.name not in kept:
                        evicted.append(file.name)
                        over -= file.nbytes
            if over > 0:
                raise CacheFull(
                    f"weights sha256:{digest[:12]} of {length} bytes have no room: {self._max_bytes} bytes are kept "
                    "(--store-bytes), and requests use what is there"
                )
            self._coming[digest] = length
            self.remove(evicted)
