"""Manage the files of batches within their bounds. Methods are for the event loop.

Each key has a share of the room for files, so that no key takes all of it. Disk work runs in a few threads of its own,
separate from those that online requests wait for.
"""

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from adapter_store.storage.blobs import disk_errors
from api.auth.principal import ANYBODY, Caller
from api.batches.records import FileRecord
from api.batches.storage import FLAGS, BatchFolder
from api.errors import ApiError
from lorasrv.fair_lock import most_of

P = ParamSpec("P")
T = TypeVar("T")
_POOL = ThreadPoolExecutor(4, thread_name_prefix="batch")


def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run work as `asyncio.to_thread` does, but in the batch threads, even if the result is not awaited: large files
    must not delay the admission of requests.
    """
    return asyncio.get_running_loop().run_in_executor(_POOL, lambda: work(*args, **kwargs))


MAX_NAME_CHARS = 255
MAX_FORM_BYTES = 64 << 10
"""Allowance for the form around a file."""


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Hold the bounds of files and batches."""

    max_file_bytes: int = 200 << 20
    max_total_bytes: int = 4 << 30
    max_files: int = 2000
    max_batches: int = 1000
    max_open_batches: int = 100
    # Lines per batch, as with OpenAI.
    max_lines: int = 50_000
    # Age at which a file is deleted.
    max_age_s: int = 30 * 86400


class Upload:
    """Receive a file, from one thread at a time; `close` drops it unless it was kept."""

    def __init__(self, folder: BatchFolder, max_bytes: int) -> None:
        self.path = folder.new_temporary()
        self.received = 0
        self._max_bytes = max_bytes
        with disk_errors("starting an upload"):
            self._file = os.fdopen(os.open(self.path, FLAGS, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Append data.

        Raises:
            ApiError: 413, the file is too large.
            StoreFull, StoreUnusable.
        """
        self.received += len(data)
        if self.received > self._max_bytes:
            raise ApiError(413, f"a file has at most {self._max_bytes} bytes", code="file_too_large", param="file")
        with disk_errors("writing an upload"):
            self._file.write(data)

    def sync(self) -> None:
        """Write all bytes to disk.

        Raises: StoreFull, StoreUnusable.
        """
        with disk_errors("finishing an upload"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def close(self) -> None:
        """Remove the temporary file, unless it has been renamed. Never fails."""
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


class FileManager:
    """Own the files; `records` are ordered by age, oldest first.

    Args:
        awaited: returns the principal and the reserved bytes of each file that an open batch may still create.
    """

    def __init__(
        self,
        folder: BatchFolder,
        records: dict[str, FileRecord],
        bounds: BatchBounds,
        clock: Callable[[], float] = time.time,
        awaited: Callable[[], Iterable[tuple[str, int]]] = tuple,
    ) -> None:
        self.records = records
        self.bounds = bounds
        self._folder = folder
        self._clock = clock
        self._awaited = awaited
        self._announced: Counter[str] = Counter()

    def get(self, file_id: str, param: str = "file_id") -> FileRecord:
        """Return a file.

        Raises:
            ApiError: 404.
        """
        record = self.records.get(file_id)
        if record is None:
            raise ApiError(404, "there is no such file; it may have expired", code="file_not_found", param=param)
        return record

    def path(self, file_id: str) -> Path:
        return self._folder.content(file_id)

    @asynccontextmanager
    async def receiving(self, announced: int, caller: Caller = ANYBODY) -> AsyncIterator[Upload]:
        """Reserve room for a body and open an upload, which is dropped at the end unless it was kept.

        Raises:
            ApiError: 413, 507.
            StoreFull, StoreUnusable.
        """
        most = self.bounds.max_file_bytes
        if announced > most + MAX_FORM_BYTES:
            raise ApiError(413, f"a file has at most {most} bytes", code="file_too_large", param="file")
        self.check_room(1, announced, caller)
        self._announced[caller.principal] += announced
        try:
            upload = await in_thread(Upload, self._folder, most)
            try:
                yield upload
            finally:
                # Not in a thread: a cancelled request (client disconnected) may not wait for one.
                upload.close()
        finally:
            self._announced[caller.principal] -= announced
            if not self._announced[caller.principal]:
                del self._announced[caller.principal]

    async def keep(
        self, upload: Upload, filename: str, purpose: str, age_s: int | None = None, principal: str = ANYBODY.principal
    ) -> FileRecord:
        """Turn the upload into a file of the principal.

        Raises: StoreFull, StoreUnusable.
        """
        await in_thread(upload.sync)
        record = self._record(new_file_id(), upload.received, filename, purpose, age_s, principal)
        # Registered before it is on disk, so that concurrent requests count it.
        self.records[record.id] = record
        try:
            await unbroken(in_thread(self._folder.add_file, upload.path, record))
        except Exception:
            del self.records[record.id]
            raise
        return record

    async def publish(self, file_id: str, filename: str, age_s: int | None, principal: str) -> None:
        """Turn a results file into a visible file; remove an empty one.

        Raises: StoreFull, StoreUnusable.
        """
        path = self.path(file_id)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            await in_thread(self._folder.remove_file, file_id)
            return
        record = self._record(file_id, size, filename, "batch_output", age_s, principal)
        await in_thread(self._folder.write_file_record, record)
        self.records[file_id] = record

    async def delete(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404.
            StoreUnusable.
        """
        self.get(file_id)
        del self.records[file_id]
        await unbroken(in_thread(self._folder.remove_file, file_id))

    def expired(self) -> list[str]:
        """Return the ids of files past their expiry."""
        now = self._clock()
        return [record.id for record in self.records.values() if record.expires_at <= now]

    def _record(
        self, file_id: str, size: int, filename: str, purpose: str, age_s: int | None, principal: str
    ) -> FileRecord:
        now = int(self._clock())
        age = min(age_s or self.bounds.max_age_s, self.bounds.max_age_s)
        return FileRecord(file_id, size, now, now + age, filename[:MAX_NAME_CHARS], purpose, principal)

    def check_room(self, num_files: int, num_bytes: int, caller: Caller, param: str = "file") -> None:
        """Check that the caller may have `num_files` and `num_bytes` more.

        Raises:
            ApiError: 507.
        """
        limit, who = caller.limits.max_stored_bytes, caller.principal
        held = [*((record.principal, record.bytes) for record in self.records.values()), *self._awaited()]
        sizes = [size for principal, size in held if principal == who]
        own = sum(sizes) + self._announced[who]
        if limit is not None and own + num_bytes > limit:
            raise _full(f"this key's files have {own} bytes, and {limit} are allowed (max_stored_bytes)", param)
        most_files, most_bytes = (most_of(n, who) for n in (self.bounds.max_files, self.bounds.max_total_bytes))
        if len(sizes) + num_files > most_files:
            raise _full(f"there are {len(sizes)} files already, and {most_files} are allowed", param)
        if own + num_bytes > most_bytes:
            raise _full(f"files have {own} bytes, and {most_bytes} are allowed", param)
        # The message does not reveal the usage of others.
        used = sum(size for _, size in held) + self._announced.total()
        if len(held) + num_files > self.bounds.max_files or used + num_bytes > self.bounds.max_total_bytes:
            raise _full("there is no room among the files of all keys", param)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def _full(why: str, param: str) -> ApiError:
    message = f"{why}; delete those that are not needed any more"
    return ApiError(507, message, code="quota_exceeded", param=param, headers={"x-should-retry": "false"})


async def unbroken(work: Awaitable[T]) -> T:
    """Finish work on the disk even if the waiting task is cancelled, so that memory and disk agree."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            # It may be cancelled several times: by two clients that cancel a batch, or by a client and the shutdown.
            cancelled = error
    done = task.result()
    if cancelled is not None:
        raise cancelled
    return done


MAX_AT_A_TIME = 4
"""Concurrently running batches per key."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KeyBounds:
    """Bound the batches of one key: lines that wait to run hold memory for long, and must leave some to other keys."""

    # Lines in memory.
    places: asyncio.Semaphore
    # Running batches.
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_A_TIME))
