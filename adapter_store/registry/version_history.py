"""What each version came from, and what verifying it came to: of that version alone, also where others share its
content."""

import threading
from collections.abc import Callable, Mapping

from adapter_store.errors import AdapterNotFound
from adapter_store.formats.peft_dir import PeftDir
from adapter_store.registry.index import Index, Upload
from adapter_store.spec import AdapterRef
from adapter_store.storage.blobs import BlobDirectory
from adapter_store.validation.report import UploadReport


class VersionHistory:
    """Reads the index; JSON is parsed outside the lock.

    Args:
        lock: the store's.
        check_open: raises StoreUnusable once the store is closed.
    """

    def __init__(
        self, lock: threading.RLock, index: Index, blobs: BlobDirectory, check_open: Callable[[], None]
    ) -> None:
        self._lock = lock
        self._index = index
        self._blobs = blobs
        self._check_open = check_open

    def report(self, ref: AdapterRef) -> UploadReport:
        """What the uploader was told. Raises: AdapterNotFound."""
        return self._upload(ref).report

    def peft(self, ref: AdapterRef) -> PeftDir:
        """A version as it was uploaded, for another process to read while it is held. Raises: AdapterNotFound."""
        upload = self._upload(ref)
        return PeftDir(dict(upload.config), self._blobs.path(upload.content.weights_digest), ())

    def record_verdict(self, ref: AdapterRef, verdict: Mapping[str, object]) -> None:
        """Keep what verifying a version came to, as JSON, for as long as the version; replaces an earlier one.

        Raises:
            AdapterNotFound: there is no such version.
            ValueError: JSON has no word for it.
            StoreFull, StoreUnusable: the disk refused; the earlier one stays.
        """
        with self._lock:
            self._upload(ref)
            self._index.record_verdict(ref.adapter_id, ref.version, verdict)

    def verdict(self, ref: AdapterRef) -> Mapping[str, object] | None:
        """What `record_verdict` was last told of a version, None if nothing."""
        with self._lock:
            self._check_open()
            return self._index.verdict(ref.adapter_id, ref.version)

    def _upload(self, ref: AdapterRef) -> Upload:
        with self._lock:
            self._check_open()
            upload = self._index.upload(ref.adapter_id, ref.version)
        if upload is None:
            raise AdapterNotFound(f"{ref.adapter_id}@{ref.version}")
        return upload
