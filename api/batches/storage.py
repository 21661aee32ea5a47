"""Store files and batches below the store's folder.

    root/batches/files/<file id>          content: complete, or results of a running batch
    root/batches/files/<file id>.json     its record, which makes the file visible
    root/batches/<batch id>.json          a batch
    root/batches/tmp/<hex>                uploads and records being written; wiped at the start

A record is replaced atomically (temporary file, fsync, rename, fsync of the folder), after the content that it
describes: a crash leaves the old state or the new one. Content without a record is removed at the start.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from adapter_store.errors import StoreUnusable
from adapter_store.storage.blobs import disk_errors, fsync_directory
from api.batches.records import BatchRecord, FileRecord

FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
R = TypeVar("R", FileRecord, BatchRecord)


class BatchFolder:
    """Manage the folder of one server, created on first use. Blocking: for worker threads and the start.

    Raises (all methods): StoreFull, StoreUnusable.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = root / "files"
        self._temporary = root / "tmp"
        self._is_made = False

    def read(self) -> tuple[dict[str, FileRecord], dict[str, BatchRecord]]:
        """Return the records by id, oldest first, after removing content without a record."""
        if not self._root.is_dir():
            return {}, {}
        self._make()
        with disk_errors("reading batches"):
            for path in self._temporary.iterdir():
                path.unlink()
            files = _read_all(self._files, FileRecord)
            batches = _read_all(self._root, BatchRecord)
            in_use = {*files, *(name for b in batches.values() for name in (b.output_file, b.error_file))}
            self._remove_unnamed(in_use)
        return files, batches

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / file_id

    def new_temporary(self) -> Path:
        """Return a path for an upload in progress."""
        self._make()
        return self._temporary / secrets.token_hex(16)

    def add_file(self, temporary: Path, record: FileRecord) -> None:
        """Give a complete and synced file its name and its record."""
        with disk_errors("storing a file"):
            os.replace(temporary, self.content(record.id))
            fsync_directory(self._files)
        try:
            self.write_file_record(record)
        except BaseException:
            # Without a record, the content would belong to nobody until the next start.
            self.content(record.id).unlink(missing_ok=True)
            raise

    def write_file_record(self, record: FileRecord) -> None:
        self._write(self._files / f"{record.id}.json", record.to_dict())

    def write_batch(self, record: BatchRecord) -> None:
        self._write(self._root / f"{record.id}.json", record.to_dict())

    def remove_file(self, file_id: str) -> None:
        """Remove the record first: content without a record belongs to no file."""
        self._remove(self._files / f"{file_id}.json", self.content(file_id))

    def remove_batch(self, batch_id: str) -> None:
        self._remove(self._root / f"{batch_id}.json")

    def _remove(self, *paths: Path) -> None:
        with disk_errors("removing a file"):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    fsync_directory(path.parent)

    def _remove_unnamed(self, in_use: Collection[str]) -> None:
        for path in self._files.iterdir():
            if path.suffix != ".json" and path.name not in in_use:
                path.unlink()

    def _write(self, path: Path, value: Any) -> None:
        temporary = self.new_temporary()
        with disk_errors("writing a batch"):
            data = json.dumps(value).encode()
            try:
                with os.fdopen(os.open(temporary, FLAGS, 0o600), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            fsync_directory(path.parent)

    def _make(self) -> None:
        if self._is_made:
            return
        with disk_errors("making the folder of batches"):
            for folder in (self._root, self._files, self._temporary):
                folder.mkdir(mode=0o700, exist_ok=True)
            for folder in (self._root.parent, self._root):
                fsync_directory(folder)
        self._is_made = True


def _read_all(folder: Path, kind: type[R]) -> dict[str, R]:
    records = []
    for path in folder.glob("*.json"):
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            raise StoreUnusable(f"the record {path.name} of a batch or of its files is damaged") from None
        records.append(kind.from_dict(value))
    return {record.id: record for record in sorted(records, key=lambda r: (r.created_at, r.id))}
