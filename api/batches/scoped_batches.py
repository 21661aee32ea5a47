"""Files and batches as one caller sees them: its own, or all for an administrator."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from api.auth.principal import Caller, Scope
from api.batches.files import Upload
from api.batches.manager import BatchManager
from api.batches.records import BatchRecord, FileRecord


class ScopedBatches:
    """Restrict a manager to the caller's files and batches; others look missing. Methods raise the same errors as the
    manager's.
    """

    def __init__(self, manager: BatchManager, caller: Caller) -> None:
        self._manager = manager
        self._caller = caller

    # Files.

    def files(self) -> list[FileRecord]:
        """Return the caller's files, oldest first."""
        return [record for record in self._manager.files.records.values() if self._is_own(record)]

    def file(self, file_id: str, param: str = "file_id") -> FileRecord:
        record = self._manager.files.records.get(file_id)
        return self._manager.files.get(file_id if record is None or self._is_own(record) else "", param)

    def path(self, file_id: str) -> Path:
        return self._manager.files.path(self.file(file_id).id)

    def receiving(self, announced: int) -> AbstractAsyncContextManager[Upload]:
        return self._manager.files.receiving(announced, self._caller)

    async def keep(self, upload: Upload, filename: str, purpose: str, age_s: int | None = None) -> FileRecord:
        return await self._manager.files.keep(upload, filename, purpose, age_s, self._caller.principal)

    async def delete_file(self, file_id: str) -> None:
        await self._manager.delete_file(self.file(file_id).id)

    # Batches.

    def all(self) -> list[BatchRecord]:
        """Return the caller's batches, oldest first."""
        return [record for record in self._manager.records.values() if self._is_own(record)]

    def get(self, batch_id: str) -> BatchRecord:
        record = self._manager.records.get(batch_id)
        return self._manager.get(batch_id if record is None or self._is_own(record) else "")

    def shown(self, record: BatchRecord) -> dict[str, Any]:
        return self._manager.shown(record)

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        window: tuple[str, int],
        metadata: Mapping[str, str] | None = None,
        result_age_s: int | None = None,
    ) -> BatchRecord:
        self.file(input_file_id, "input_file_id")
        return await self._manager.create(input_file_id, endpoint, window, metadata, result_age_s, self._caller)

    async def cancel(self, batch_id: str) -> BatchRecord:
        return await self._manager.cancel(self.get(batch_id).id)

    def _is_own(self, record: FileRecord | BatchRecord) -> bool:
        return record.principal == self._caller.principal or self._caller.may(Scope.ADMIN)
