"""Origin, defaults and verdict of each version: they belong to that version alone, even if others share its content."""

import threading
from collections.abc import Callable, Mapping

from adapter_store.errors import AdapterNotFound
from adapter_store.formats.peft_dir import PeftDir
from adapter_store.registry.index import Index, Upload
from adapter_store.spec import AdapterRef
from adapter_store.storage.blobs import BlobDirectory
from adapter_store.validation.report import UploadReport


class VersionHistory:
    """Read what is recorded about versions; JSON is parsed outside the lock.

    Args:
        lock: the store's lock.
        index: the store's index.
        blobs: the weights.
        check_open: raises StoreUnusable once the store is closed.
        check_owner: like `check_open`, but also raises StoreFollows in a follower, where nothing can be changed.
    """

    def __init__(
        self,
        lock: threading.RLock,
        index: Index,
        blobs: BlobDirectory,
        check_open: Callable[[], None],
        check_owner: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._index = index
        self._blobs = blobs
        self._check_open, self._check_owner = check_open, check_owner

    def report(self, ref: AdapterRef) -> UploadReport:
        """Return the report that was sent in response to the upload.

        Raises:
            AdapterNotFound: there is no such version.
        """
        return self._upload(ref).report

    def defaults(self, ref: AdapterRef) -> str:
        """Return the defaults of a version as they were sent, as JSON.

        Raises:
            AdapterNotFound: there is no such version, or it has no defaults.
        """
        with self._lock:
            self._check_open()
            found = self._index.defaults(ref.adapter_id, ref.version)
        if found is None:
            raise AdapterNotFound(f"{ref.adapter_id}@{ref.version}")
        return found

    def owner(self, ref: AdapterRef) -> str:
        """Return the principal of a version."""
        with self._lock:
            self._check_open()
            return self._index.owner(ref.adapter_id, ref.version)

    def peft_dir(self, ref: AdapterRef) -> PeftDir:
        """Return a version as it was uploaded, for another process; the caller holds the content while that reads.

        Raises:
            AdapterNotFound: there is no such version.
        """
        upload = self._upload(ref)
        return PeftDir(dict(upload.config), self._blobs.path(upload.content.weights_digest), ())

    def record_verdict(self, ref: AdapterRef, verdict: Mapping[str, object]) -> None:
        """Store the result of verifying a version, as JSON, replacing an earlier one; it is deleted with the version.

        Raises:
            AdapterNotFound: there is no such version.
            ValueError: it is not representable as JSON.
            StoreFull, StoreUnusable: the disk refused; the earlier verdict stays.
        """
        with self._lock:
            self._check_owner()
            self._upload(ref)
            self._index.record_verdict(ref.adapter_id, ref.version, verdict)

    def verdict(self, ref: AdapterRef) -> Mapping[str, object] | None:
        """Return the last recorded verdict of a version, or None."""
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
