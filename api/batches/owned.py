"""Files and batches as one caller may know them: its own. An administrator knows all. There is no other way."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from api.batches.files import Upload
from api.batches.keeper import BatchKeeper
from api.batches.records import BatchRecord, FileRecord
from api.keys.caller import Caller, Scope


class OwnBatches:
    """The caller's part of what a keeper keeps; what is another's is not there. Methods raise what the keeper's do."""

    def __init__(self, keeper: BatchKeeper, caller: Caller) -> None:
        self._keeper = keeper
        self._caller = caller

    # Files.

    def files(self) -> list[FileRecord]:
        """Oldest first."""
        return [record for record in self._keeper.files.records.values() if self._is_own(record)]

    def file(self, file_id: str, param: str = "file_id") -> FileRecord:
        record = self._keeper.files.records.get(file_id)
        return self._keeper.files.get(file_id if record is None or self._is_own(record) else "", param)

    def path(self, file_id: str) -> Path:
        return self._keeper.files.path(self.file(file_id).id)

    def receiving(self, announced: int) -> AbstractAsyncContextManager[Upload]:
        return self._keeper.files.receiving(announced, self._caller)

    async def keep(self, upload: Upload, filename: str, purpose: str, age_s: int | None = None) -> FileRecord:
        return await self._keeper.files.keep(upload, filename, purpose, age_s, self._caller.principal)

    async def delete_file(self, file_id: str) -> None:
        await self._keeper.delete_file(self.file(file_id).id)

    # Batches.

    def all(self) -> list[BatchRecord]:
        """Oldest first."""
        return [record for record in self._keeper.records.values() if self._is_own(record)]

    def get(self, batch_id: str) -> BatchRecord:
        record = self._keeper.records.get(batch_id)
        return self._keeper.get(batch_id if record is None or self._is_own(record) else "")

    def shown(self, record: BatchRecord) -> dict[str, Any]:
        return self._keeper.shown(record)

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        window: tuple[str, int],
        metadata: Mapping[str, str] | None = None,
        result_age_s: int | None = None,
    ) -> BatchRecord:
        self.file(input_file_id, "input_file_id")
        return await self._keeper.create(input_file_id, endpoint, window, metadata, result_age_s, self._caller)

    async def cancel(self, batch_id: str) -> BatchRecord:
        return await self._keeper.cancel(self.get(batch_id).id)

    def _is_own(self, record: FileRecord | BatchRecord) -> bool:
        return record.principal == self._caller.principal or self._caller.may(Scope.ADMIN)
