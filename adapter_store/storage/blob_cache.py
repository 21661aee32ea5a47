"""Weights of a follower: a bounded cache of the origin's blobs, fetched by digest when they are first opened.

A fetch is an upload to this folder: the blob becomes visible when all bytes have arrived and match the digest, so a
crash leaves a whole blob or none. A fetch resumes after a broken connection. When the bytes would exceed the limit or
fill the disk, the least recently opened blobs are removed first, except held ones.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from adapter_store.errors import (
    AdapterCorrupt,
    BlobLengthMismatch,
    BlobNotFound,
    CacheFull,
    CacheTooSmall,
    DigestMismatch,
    OriginUnreachable,
    StoreFull,
)  # fmt: skip
from adapter_store.storage.blobs import PROBE_BYTES, BlobDirectory, BlobFile, BlobUpload, disk_errors

MAX_FETCHES = 2
"""Complete fetches of a blob with a wrong digest or length after which it counts as damaged."""
MAX_STALLS = 3
"""Consecutive connections without sufficient progress after which a fetch fails."""
LEAST_PROGRESS = 0.01
"""Sufficient progress of a connection: more than this share of the blob, or than `LEAST_PROGRESS_BYTES`, if fewer."""
LEAST_PROGRESS_BYTES = 64 << 10
SPARE_BYTES = PROBE_BYTES + (1 << 20)
"""Bytes of the disk that stay free: those that readiness requires, and some for changes of the index."""
_LOG = logging.getLogger(__name__)


class Origin(Protocol):
    """Read from the store that this one follows. Any thread may call, several at a time."""

    @property
    def address(self) -> str:
        """Return the address to which clients must send changes."""

    def check(self) -> None:
        """Raise OriginUnreachable if the last attempt to reach it failed."""

    def fetch(self, digest: str, start: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Return the length of a blob, and its bytes from `start` on.

        Raises:
            BlobNotFound: the origin does not have it.
            OriginUnreachable: the origin does not answer, or stopped while the bytes were read.
        """


@dataclass(slots=True)
class _Coming:
    """Count the bytes of a blob that is being fetched."""

    length: int
    received: int = 0

    @property
    def least_progress(self) -> float:
        """Return the bytes that a connection must exceed to count as progress."""
        return min(LEAST_PROGRESS * self.length, LEAST_PROGRESS_BYTES)


class BlobCache(BlobDirectory):
    """Open blobs, fetching those that are missing.

    Args:
        root: the store's folder.
        origin: where blobs come from.
        max_bytes: most bytes in the folder.
        max_blob_bytes: most bytes of a usable blob.
        held: returns the digests of blobs that must stay.
    """

    def __init__(
        self, root: Path, origin: Origin, max_bytes: int, max_blob_bytes: int, held: Callable[[], Collection[str]]
    ) -> None:
        super().__init__(root)
        self._origin = origin
        self._max_bytes, self._max_blob_bytes = max_bytes, max_blob_bytes
        self._held = held
        # Held briefly, never during a fetch.
        self._lock = threading.Lock()
        self._fetches: dict[str, threading.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._coming: dict[str, _Coming] = {}
        # No blob is held yet, and on a full disk the rest of the store could not be opened.
        self._keep_room(())

    def open(self, digest: str) -> BufferedReader:
        """Open a blob for reading, fetching it first if it is not here.

        Raises:
            BlobNotFound: the origin does not have it.
            AdapterCorrupt: `MAX_FETCHES` fetches did not match the digest, or it exceeds `max_blob_bytes`.
            OriginUnreachable: it cannot be fetched now.
            CacheFull: there is no room for it beside held blobs.
            CacheTooSmall: it has more than `max_bytes`.
        """
        with self._alone(digest):
            try:
                file = super().open(digest)
            except BlobNotFound:
                self._fetch(digest)
                file = super().open(digest)
        with contextlib.suppress(OSError):
            # The file's time is the time of the last use, also after a restart.
            os.utime(self.path(digest))
        return file

    def drop_damaged(self, digest: str) -> bool:
        """Remove a blob that was read back damaged, so that the next open fetches it; return whether there was one."""
        with self._alone(digest):
            is_here = self.exists(digest)
            self.remove([digest])
            return is_here

    @contextlib.contextmanager
    def _alone(self, digest: str) -> Iterator[None]:
        """Let one thread at a time open or fetch a blob, which is not evicted meanwhile."""
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
            coming, stalls = _Coming(0), 0
            while True:
                before = coming.received
                try:
                    with self._origin.fetch(digest, before) as (length, chunks):
                        if upload is None:
                            coming = self._make_room(digest, length)
                            upload = opened.enter_context(BlobUpload(self, digest, length))
                        for chunk in chunks:
                            upload.write(chunk)
                            coming.received += len(chunk)
                    return upload.commit()
                except OriginUnreachable:
                    if upload is not None and coming.received == coming.length:
                        # All bytes arrived before the connection failed.
                        return upload.commit()
                    stalls = 0 if coming.received - before > coming.least_progress else stalls + 1
                    if stalls >= MAX_STALLS or not coming.received:
                        raise

    def keep_room(self) -> None:
        """Remove unneeded blobs, the least recently opened first, until `SPARE_BYTES` of the disk are free.

        Raises:
            StoreFull, StoreUnusable: the disk refused.
        """
        self._keep_room(self._held())

    def _keep_room(self, held: Collection[str]) -> None:
        with self._lock:
            evicted, _ = _oldest(self.oldest_first(), self._missing_bytes(0), {*held, *self._waiting})
            self.remove(evicted)

    def _make_room(self, digest: str, length: int) -> _Coming:
        """Remove blobs to make room for one of `length` bytes, or nothing if that is not enough.

        Raises:
            AdapterCorrupt: the blob is larger than any usable one.
            CacheFull: removing all blobs that are not held would not be enough.
            CacheTooSmall: the blob alone is larger than the cache.
        """
        if length > self._max_blob_bytes:
            raise AdapterCorrupt(
                f"weights sha256:{digest[:12]} come with {length} bytes from the registry, and no adapter that this "
                f"server takes (--max-lora-rank) has more than {self._max_blob_bytes}"
            )
        if length > self._max_bytes:
            raise CacheTooSmall(
                f"weights sha256:{digest[:12]} of {length} bytes are more than this server keeps of all adapters "
                f"together, {self._max_bytes} bytes: it needs a larger --store-bytes"
            )
        with self._lock:
            files = self.oldest_first()
            coming = sum(one.length for one in self._coming.values())
            over = sum(file.nbytes for file in files) + coming + length - self._max_bytes
            missing = self._missing_bytes(length)
            evicted, freed = _oldest(files, max(over, missing), {*self._held(), *self._waiting})
            if over > freed:
                raise CacheFull(
                    f"weights sha256:{digest[:12]} of {length} bytes have no room: {self._max_bytes} bytes are kept "
                    "(--store-bytes), and requests use what is there"
                )
            if missing > freed:
                raise CacheFull(
                    f"weights sha256:{digest[:12]} of {length} bytes have no room on this replica's disk: "
                    f"{missing - freed} bytes more must be free than are, beside weights that requests use"
                )
            self.remove(evicted)
            found = self._coming[digest] = _Coming(length)
            return found

    def _missing_bytes(self, length: int) -> int:
        """Return the bytes that the disk lacks for `length` more, counting the rest of all fetches in progress."""
        with disk_errors("looking for the disk's room"):
            free = shutil.disk_usage(self._blobs).free
        coming = sum(one.length - one.received for one in self._coming.values())
        return length + coming + SPARE_BYTES - free


def _oldest(files: Sequence[BlobFile], num_bytes: int, kept: Collection[str]) -> tuple[list[str], int]:
    """Return the first files that are not `kept` and together have at least `num_bytes`, and their bytes."""
    names, found = [], 0
    for file in files:
        if found < num_bytes and file.name not in kept:
            names.append(file.name)
            found += file.nbytes
    return names, found
