"""The adapter store: one folder, one owner, safe to use from many threads.

    root/lock              held while a server uses the store
    root/index.sqlite3     ids, versions, contents (`index.py`)
    root/blobs, root/tmp   weights by digest (`blobs.py`)

Reading and hashing weights happens outside the lock; what changes the index happens under it, in one transaction that
makes the change visible at once. Resolving a name reads a dictionary and never waits for a disk.
"""

import contextlib
import difflib
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from adapter_store.blobs import BlobDirectory, BlobUpload, disk_errors
from adapter_store.contents import ContentReader
from adapter_store.errors import (
    AdapterCorrupt,
    AdapterExists,
    AdapterNotFound,
    BlobNotFound,
    BlobTooLarge,
    StoreFull,
    StoreUnusable,
)
from adapter_store.holds import ContentHold, Holds
from adapter_store.index import Content, Index
from adapter_store.loader import AdapterWeights
from adapter_store.manifest import canonical_json
from adapter_store.peft_dir import CHUNK_BYTES, digest_file
from adapter_store.records import AdapterRecord, Deletion, Registration, VersionRecord
from adapter_store.references import VERBS, Reference, check_adapter_id, check_digest, parse_reference
from adapter_store.report import UploadReport
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef, AdapterSpec, BaseShapes
from adapter_store.store_folder import lock_root, opening
from adapter_store.validate import CheckedAdapter, check_adapter, max_adapter_bytes

NEAR_NAMES = 3


class AdapterStore:
    """Adapters of one base, kept over restarts. Every method may be called from any thread at any time.

    Raises:
        StoreLocked: another server has it open.
        StoreUnusable: it cannot be read or written, or was filled for another base.
    """

    def __init__(
        self,
        root: Path,
        base: BaseShapes,
        *,
        max_lora_rank: int = 256,
        reserved_ids: frozenset[str] = frozenset(),
    ) -> None:
        self.base = base
        self.max_lora_rank = max_lora_rank
        self.max_blob_bytes = max_adapter_bytes(base, max_lora_rank)
        self._reserved = reserved_ids | VERBS
        self._lock = threading.RLock()
        self._leases: Counter[str] = Counter()
        self._holds = Holds()
        self._closed = False
        with contextlib.ExitStack() as undo, opening(root):
            undo.callback(os.close, lock_root(root))
            self._blobs = BlobDirectory(root)
            self._index = Index(root / "index.sqlite3")
            self._contents = ContentReader(self._blobs, base, max_lora_rank, self._content)
            undo.callback(self._index.close)
            self._records = self._read_records()
            self.collect()
            self._blobs.sweep(self._index.referenced_digests())
            self._undo = undo.pop_all()

    def _read_records(self) -> dict[AdapterId, AdapterRecord]:
        if not self._index.bind_base(_fingerprint(self.base)):
            raise StoreUnusable(
                f"it holds adapters that were checked for a base of other shapes than this {self.base.family} model; "
                "give each base a folder of its own (--store)"
            )
        records = self._index.records()
        if taken := sorted(self._reserved & records.keys()):
            raise StoreUnusable(
                f"it holds an adapter named {taken[0]!r}, which is the base's name (--served-model-name)"
            )
        return records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another server have the store. Uploads under way fail; weights already loaded stay usable."""
        with self._lock:
            self._closed = True
            self._undo.close()

    @property
    def is_writable(self) -> bool:
        """Whether uploads can be taken now: open, and its folder is there and on a writable disk."""
        return not self._closed and self._blobs.is_writable

    # -- blobs

    def blob_exists(self, digest: str) -> bool:
        """Raises: InvalidDigest."""
        return self._blobs.exists(check_digest(digest))

    def open_blob(self, digest: str, length: int) -> BlobUpload:
        """Begin an upload of `length` bytes whose SHA-256 is `digest`.

        Raises:
            InvalidDigest: not 64 hex digits.
            BlobTooLarge: no adapter of this base is that long.
            StoreFull, StoreUnusable: the disk refused.
        """
        hex_digest = check_digest(digest)
        if length > self.max_blob_bytes:
            raise BlobTooLarge(length, self.max_blob_bytes)
        self._check_open()
        return BlobUpload(self._blobs, hex_digest, length)

    def add_blob(self, path: Path) -> str:
        """Copy a local weights file into the store; returns its digest.

        Raises:
            BlobTooLarge, StoreFull, StoreUnusable: as `open_blob`.
            DigestMismatch, BlobLengthMismatch: the file changed while it was read.
        """
        digest = digest_file(path)
        with path.open("rb") as file, self.open_blob(digest, path.stat().st_size) as upload:
            while chunk := file.read(CHUNK_BYTES):
                upload.write(chunk)
            upload.commit()
        return digest

    # -- names

    def register(
        self, adapter_id: str, config: Mapping[str, object], weights_digest: str, *, if_not_exists: bool = False
    ) -> Registration:
        """Check uploaded weights against the base and make them the id's current version.

        A content that the id already has keeps its version number; the id moves to it. If the check or the disk
        refuses, nothing is stored, and the weights are removed unless a version or another registration needs them.

        Raises:
            InvalidAdapterId, InvalidDigest, BlobNotFound: before anything is read.
            AdapterExists: `if_not_exists`, and the id does.
            AdapterInvalid: with every problem found.
            AdapterCorrupt: the disk returned other bytes than were uploaded.
            StoreFull, StoreUnusable: the disk refused.
        """
        name = check_adapter_id(adapter_id, self._reserved)
        digest = check_digest(weights_digest)
        if if_not_exists and name in self._records:
            raise AdapterExists(name)
        with self._leased(digest):
            checked = self._check(config, digest)
            content = Content(checked.spec.key, digest, config, checked.report)
            with self._lock:
                self._check_open()
                if if_not_exists and name in self._records:
                    raise AdapterExists(name)
                version, created = self._index.add_version(name, content, time.time())
                self._refresh(name)
        return Registration(AdapterRef(name, version, checked.spec.key), created, checked.report)

    def _check(self, config: Mapping[str, object], digest: str) -> CheckedAdapter:
        with self._blobs.open(digest) as file, disk_errors("reading weights"):
            size = os.fstat(file.fileno()).st_size
            checked = check_adapter(config, file, size, self.base, self.max_lora_rank)
        if checked.spec.weights_digest != digest:
            raise AdapterCorrupt(f"stored weights sha256:{digest[:12]} are damaged; upload the same file again")
        return checked

    @contextlib.contextmanager
    def _leased(self, digest: str) -> Iterator[None]:
        """Nobody removes the blob inside; the last to leave does, if no version names it."""
        with self._lock:
            self._check_open()
            if not self._blobs.exists(digest):
                raise BlobNotFound(digest)
            self._leases[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leases[digest] -= 1
                self._remove_unused(digest)

    def _remove_unused(self, digest: str) -> None:
        if self._closed or self._leases[digest]:
            return
        del self._leases[digest]
        # Litter that cannot be removed now goes when the store opens next; it must not hide why a registration failed.
        with contextlib.suppress(StoreUnusable, StoreFull):
            if not self._index.is_referenced(digest):
                self._blobs.remove(digest)

    def resolve(self, reference: str) -> AdapterRef:
        """What `mia`, `mia@3` or `mia@sha256:<12 or more digits of the key>` names now. Reads memory only.

        Raises:
            AdapterNotFound: nothing; carries up to three ids that look like it.
        """
        parsed = self._parse(reference)
        record = self._records.get(parsed.adapter_id)
        if record is None:
            raise AdapterNotFound(reference, self._near(parsed.adapter_id))
        if parsed.version is None and parsed.key_prefix is None:
            return record.ref()
        matches = _select(record, parsed)
        if len({v.key for v in matches}) != 1:
            raise AdapterNotFound(reference, (record.adapter_id,))
        return record.ref(matches[-1])

    def _parse(self, reference: str) -> Reference:
        try:
            return parse_reference(reference)
        except AdapterNotFound:
            raise AdapterNotFound(reference, self._near(reference[:64].partition("@")[0])) from None

    def _near(self, name: str) -> tuple[str, ...]:
        return tuple(difflib.get_close_matches(name.lower(), list(self._records), NEAR_NAMES))

    def list_adapters(self) -> list[AdapterRecord]:
        """Every id, sorted."""
        records = self._records
        return [records[name] for name in sorted(records)]

    def get(self, adapter_id: str) -> AdapterRecord:
        """Raises: AdapterNotFound."""
        record = self._records.get(AdapterId(adapter_id))
        if record is None:
            raise AdapterNotFound(adapter_id, self._near(adapter_id[:64]))
        return record

    def limits(self, adapter_id: str) -> Mapping[str, float]:
        """The limits of an id; none if there is no such id. Reads memory only."""
        record = self._records.get(AdapterId(adapter_id))
        return record.limits if record is not None else {}

    def set_limits(self, adapter_id: str, limits: Mapping[str, float]) -> None:
        """Replace the limits of an id, which all its versions share and which go with it.

        Raises:
            AdapterNotFound: there is no such id.
            StoreFull, StoreUnusable: the disk refused; the old ones stay.
        """
        with self._lock:
            self._check_open()
            record = self.get(adapter_id)
            self._index.set_limits(record.adapter_id, limits)
            self._refresh(record.adapter_id)

    def is_named(self, key: AdapterKey) -> bool:
        """Whether any version names this content."""
        with self._lock:
            self._check_open()
            return self._index.is_named(key)

    def delete(self, reference: str) -> Deletion:
        """Remove an id, or the version or content that the reference pins.

        The id moves to its highest version left. Weights that no version names any more are removed, once nobody holds
        them; what is in memory stays usable. Version numbers are not used again.

        Raises:
            AdapterNotFound: there is nothing of that name.
        """
        parsed = self._parse(reference)
        with self._lock:
            self._check_open()
            record = self._records.get(parsed.adapter_id)
            doomed = _select(record, parsed) if record is not None else ()
            if record is None or not doomed:
                raise AdapterNotFound(reference, self._near(parsed.adapter_id))
            self._index.delete_versions(record, frozenset(v.version for v in doomed))
            self._refresh(parsed.adapter_id)
            # It is deleted whether or not the disk lets its weights go now.
            with contextlib.suppress(StoreUnusable, StoreFull):
                self.collect()
            contents = sorted({v.key for v in doomed})
            return Deletion(len(doomed), tuple(key for key in contents if not self._index.is_named(key)))

    def hold(self, key: AdapterKey) -> ContentHold:
        """Keep a content for as long as the returned object lives, whatever is deleted meanwhile.

        Raises: AdapterNotFound: it is gone already.
        """
        with self._lock:
            self._content(key)
            return self._holds.take(key)

    def collect(self) -> int:
        """Remove contents that no version names and nobody holds, with their weights; returns how many.

        Deleting does it; what was held at that time goes with the next call.
        """
        with self._lock:
            self._check_open()
            unnamed = self._index.unnamed() - self._holds.held()
            if unnamed:
                for digest in sorted(self._index.drop(unnamed)):
                    self._remove_unused(digest)
            return len(unnamed)

    def _refresh(self, adapter_id: AdapterId) -> None:
        """Bring one id of the dictionary up to date. It is replaced, not changed: readers do not lock."""
        records = dict(self._records)
        records.pop(adapter_id, None)
        self._records = records | self._index.records(adapter_id)

    # -- contents

    def report(self, key: AdapterKey) -> UploadReport:
        """The upload report of a content. Raises: AdapterNotFound."""
        return self._content(key).report

    def spec(self, key: AdapterKey) -> AdapterSpec:
        """What a content is, read from the header of its weights and checked against the base once more.

        Raises:
            AdapterNotFound: no version names it, and nobody held it, so that it was removed.
            AdapterCorrupt: its weights are damaged or gone.
            AdapterInvalid: this server's limits are tighter than those it was accepted under.
        """
        return self._contents.spec(self._content(key))

    def load(self, key: AdapterKey, should_stop: Callable[[], bool] = lambda: False) -> AdapterWeights:
        """Read a content's weights; the digest is verified, and the spec checked, before anything is handed out.

        Raises:
            AdapterNotFound, AdapterCorrupt, AdapterInvalid: as `spec`.
            LoadCancelled: `should_stop` said so meanwhile.
        """
        return self._contents.load(self._content(key), should_stop)

    def _content(self, key: AdapterKey) -> Content:
        with self._lock:
            self._check_open()
            content = self._index.content(key)
        if content is None:
            raise AdapterNotFound(key)
        return content

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnusable("the store is closed")


def _select(record: AdapterRecord, pin: Reference) -> tuple[VersionRecord, ...]:
    """The versions that a reference means when everything of an id is meant unless it is pinned."""
    if pin.version is not None:
        return tuple(v for v in record.versions if v.version == pin.version)
    if pin.key_prefix is not None:
        return tuple(v for v in record.versions if v.key.startswith(pin.key_prefix))
    return record.versions


def _fingerprint(base: BaseShapes) -> str:
    """Digest of what adapters are checked against. The name is left out: it is no reason to refuse."""
    modules = {name: list(shape) for name, shape in base.modules.items()}
    facts = [base.family, base.num_layers, base.layer_prefix, modules]
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()
