"""The adapter store: one folder, one owner, safe to use from many threads.

    root/lock              held while a server uses the store
    root/index.sqlite3     ids, versions, aliases, contents (`index.py`)
    root/blobs, root/tmp   weights by digest (`blobs.py`)

Reading and hashing weights happens outside the lock; what changes the index happens under it, in one transaction that
makes the change visible at once. Resolving a name reads a dictionary and never waits for a disk.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from adapter_store.errors import AdapterNotFound, BlobTooLarge, StoreFull, StoreUnusable, VersionInUse
from adapter_store.formats.peft_dir import CHUNK_BYTES, digest_file
from adapter_store.formats.weights import AdapterWeights
from adapter_store.quota import ANONYMOUS, StoreQuota
from adapter_store.registry.base_identity import BaseIdentity, bind_base
from adapter_store.registry.content_reader import ContentReader
from adapter_store.registry.index import NO_QUOTA, Content, Index, Upload
from adapter_store.registry.names import Names, read_records
from adapter_store.registry.records import AdapterRecord, Change, Deletion, Registration, check_state
from adapter_store.registry.references import VERBS, Shares, check_adapter_id, check_alias, check_digest
from adapter_store.registry.version_history import VersionHistory
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef, AdapterSpec, BaseShapes
from adapter_store.storage.blobs import UNREFERENCED_BLOB_AGE_S, BlobDirectory, BlobUpload, Swept, disk_errors
from adapter_store.storage.leases import BlobLeases
from adapter_store.storage.pending_uploads import ANYBODY, PendingUploads, Sender
from adapter_store.storage.quarantine import Quarantine
from adapter_store.storage.refcounts import ContentHold, ContentRefcounts
from adapter_store.storage.root_lock import lock_root, opening
from adapter_store.validation.validate import max_adapter_bytes

Tags = Collection[str] | None
"""States that an id may be in for a change to be done (`records.check_state`); None: any, or none at all."""


class AdapterStore:
    """Adapters of one base, kept over restarts. Every method may be called from any thread at any time.

    Args:
        quota: how much may be stored.
        draw: random numbers in [0, 1), for aliases that are split between versions.
        base_sample: numbers by which the base's weights are known again; none: they are not compared.
        accept_base_change: take a store of another base, if every adapter fits this one.

    Raises:
        StoreLocked: another server has it open.
        StoreUnusable: it cannot be read or written, or was filled for another base (`base_identity.py`).
    """

    def __init__(
        self,
        root: Path,
        base: BaseShapes,
        *,
        max_lora_rank: int = 256,
        reserved_ids: frozenset[str] = frozenset(),
        quota: StoreQuota = NO_QUOTA,
        draw: Callable[[], float] = random.random,
        base_sample: Sequence[float] = (),
        accept_base_change: bool = False,
    ) -> None:
        self.root = root
        self.base = base
        self.max_lora_rank = max_lora_rank
        self.max_blob_bytes = max_adapter_bytes(base, max_lora_rank)
        self._reserved = reserved_ids | VERBS
        self.quota = quota
        self._lock = threading.RLock()
        self._quarantine = Quarantine()
        self._closed = False
        with contextlib.ExitStack() as undo, opening(root):
            undo.callback(os.close, lock_root(root))
            self._blobs = BlobDirectory(root)
            self._index = Index(root / "index.sqlite3")
            self.staging = PendingUploads(self._blobs, self._referenced, self._quarantine.repaired)
            self._contents = ContentReader(self._blobs, base, max_lora_rank, self._content)
            undo.callback(self._index.close)
            self._holds = ContentRefcounts(self._index.keys())
            self.uploads = VersionHistory(self._lock, self._index, self._blobs, self._check_open)
            self._leases = BlobLeases(self._lock, self._blobs, self._check_open, self._index.may_name, self.staging)
            self._names = Names(read_records(self._index, self._reserved), draw)
            bind_base(self._index, BaseIdentity.of(base, base_sample), self._contents.spec, accept_base_change)
            self.collect()
            self._blobs.sweep(self._index.referenced_digests())
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another server have the store. Uploads under way fail; weights already loaded stay usable.

        Raises: StoreFull, StoreUnusable: the disk failed; it is closed all the same.
        """
        with self._lock, disk_errors("closing"):
            self._closed = True
            self._undo.close()

    @property
    def is_writable(self) -> bool:
        """Whether uploads can be taken now: open, and its folder is there and on a writable disk."""
        return not self._closed and self._blobs.is_writable

    def blob_exists(self, digest: str) -> bool:
        """Raises: InvalidDigest."""
        return self._blobs.exists(check_digest(digest))

    def open_blob(self, digest: str, length: int, sender: Sender = ANYBODY) -> BlobUpload:
        """Begin an upload of `length` bytes whose SHA-256 is `digest`.

        Raises:
            InvalidDigest: not 64 hex digits.
            BlobTooLarge: no adapter of this base is that long.
            QuotaExceeded: too many bytes were sent that no version names yet (`staging.py`).
            StoreFull, StoreUnusable: the disk refused.
        """
        if length > self.max_blob_bytes:
            raise BlobTooLarge(length, self.max_blob_bytes)
        self._check_open()
        return self.staging.open(check_digest(digest), length, self.quota.store_bytes, sender)

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

    def register(
        self,
        adapter_id: str,
        config: Mapping[str, object],
        weights_digest: str,
        *,
        if_not_exists: bool = False,
        alias: str | None = None,
        if_match: Tags = None,
        principal: str = ANONYMOUS,
        max_bytes: int | None = None,
        is_known: bool = True,
        allow_partial: bool = False,
    ) -> Registration:
        """Check uploaded weights against the base and make them the id's current version, and the alias's.

        `allow_partial` takes one whose config names more modules than there are tensors for. `max_bytes`: of all that
        is the principal's. Weights not `is_known` to it are not there. A content that the id already has keeps its
        version number; the id moves to it. If the check or the disk refuses, nothing is stored, and the weights are
        removed unless a version or another registration needs them.

        Raises:
            InvalidAdapterId, InvalidAlias, InvalidDigest, BlobNotFound: before anything is read.
            AdapterExists: `if_not_exists`, and the id does.
            AdapterChanged: it is not in one of the states of `if_match`.
            AdapterInvalid: with every problem found.
            AdapterCorrupt: the disk returned other bytes than were uploaded.
            QuotaExceeded: the principal, or the store, would have more than is allowed.
            StoreFull, StoreUnusable: the disk refused.
        """
        name = check_adapter_id(adapter_id, self._reserved)
        digest = check_digest(weights_digest)
        if alias is not None:
            check_alias(alias)
        check_state(name, self._names.find(name), if_match, if_not_exists=if_not_exists)
        with self._leases.lease(digest, is_known), self.staging.using(principal, digest):
            checked = self._contents.check(config, digest, allow_partial)
            upload = Upload.of(config, digest, checked.report)
            with self._lock:
                self._check_open()
                check_state(name, self._names.find(name), if_match, if_not_exists=if_not_exists)
                version, created, record = self._index.add_version(
                    name, upload, time.time(), alias=alias, principal=principal, quota=self.quota.with_bytes(max_bytes)
                )
                self._holds.add((checked.spec.key,))
                self._names.replace(name, record)
        return Registration(AdapterRef(name, version, checked.spec.key), created, checked.report)

    def resolve(self, reference: str) -> AdapterRef:
        """What `mia`, `mia:prod`, `mia@3` or `mia@sha256:<12 or more digits of the key>` names now. Reads memory only.

        For an alias that is split between versions each call draws one of them, by their shares.

        Raises:
            AdapterNotFound: nothing; carries up to three ids that look like it.
        """
        return self._names.resolve(reference)

    def targets(self, reference: str) -> tuple[AdapterRecord, Shares]:
        """The id that `resolve` would find, and the version that it would return; of an alias that is split, both, with
        their shares. Draws nothing. Raises: AdapterNotFound.
        """
        return self._names.targets(reference)

    def resolve_one(self, reference: str) -> AdapterRef:
        """As `resolve`, but an alias that is split is refused. Raises: AdapterNotFound, InvalidAlias."""
        return self._names.resolve_one(reference)

    def list_adapters(self) -> list[AdapterRecord]:
        """Every id, sorted."""
        return self._names.all()

    def records(self) -> Mapping[AdapterId, AdapterRecord]:
        """Every id, in no order. The same object as long as nothing changes; what was returned never does."""
        return self._names.records

    def get(self, adapter_id: str) -> AdapterRecord:
        """Raises: AdapterNotFound."""
        return self._names.get(adapter_id)

    def limits(self, adapter_id: str) -> Mapping[str, float]:
        """The limits of an id; none if there is no such id. Reads memory only."""
        record = self._names.find(adapter_id)
        return record.limits if record is not None else {}

    def change(self, adapter_id: str, change: Change, *, if_match: Tags = None) -> AdapterRecord:
        """Move an id to another of its versions, set, move or remove aliases, replace limits: all at once, or nothing.

        Returns the id as it is then. Requests that were resolved before keep their version.

        Raises:
            AdapterNotFound: there is no such id.
            VersionNotFound: it has no such version.
            InvalidAlias: an alias's name or target is none.
            AdapterChanged: the id is not in one of the states of `if_match`.
            StoreFull, StoreUnusable: the disk refused; everything is as before.
        """
        change.check()
        with self._lock:
            self._check_open()
            record = self.get(adapter_id)
            check_state(adapter_id, record, if_match)
            change.check_versions(record)
            changed = self._index.change(record.adapter_id, change)
            self._names.replace(record.adapter_id, changed)
            return changed

    def is_named(self, key: AdapterKey) -> bool:
        """Whether any version names this content."""
        with self._lock:
            self._check_open()
            return self._index.is_named(key)

    def delete(self, reference: str, *, force: bool = False, if_match: Tags = None) -> Deletion:
        """Remove an id, or the version or content that the reference pins.

        The id moves to its highest version left. Weights that no version names any more are removed, once nobody holds
        them; what is in memory stays usable. Version numbers are not used again.

        Raises:
            AdapterNotFound: there is nothing of that name.
            InvalidAlias: it is an alias; `change` removes those.
            AdapterChanged: the id is not in one of the states of `if_match`.
            VersionInUse: an alias names it; `force` removes the alias too.
        """
        with self._lock:
            self._check_open()
            record, doomed = self._names.select(reference)
            check_state(record.adapter_id, record, if_match)
            versions = frozenset(v.version for v in doomed)
            aliases = record.aliases_of(versions)
            if aliases and not force:
                raise VersionInUse(record.adapter_id, aliases)
            left, unnamed = self._index.delete_versions(record, versions)
            self._names.replace(record.adapter_id, left)
            # It is deleted whether or not the disk lets its weights go now.
            with contextlib.suppress(StoreUnusable, StoreFull):
                self.collect()
            contents = tuple(v.key for v in doomed)
            return Deletion(record.adapter_id, contents, tuple(filter(unnamed.__contains__, contents)), aliases)

    def hold(self, key: AdapterKey) -> ContentHold:
        """Keep a content for as long as the returned object lives, whatever is deleted meanwhile.

        Raises:
            AdapterNotFound: it is gone already.
            AdapterCorrupt: it is in quarantine.
        """
        # Not under the store's lock, which others keep while the disk works: `ContentRefcounts` says who wins
        # against a deletion.
        self._check_open()
        hold = self._holds.take(key)
        self._quarantine.check(key)
        return hold

    def collect(self) -> int:
        """Remove contents that no version names and nobody holds, with their weights; returns how many.

        Deleting does it; what was held at that time goes with the next call.
        """
        with self._lock:
            self._check_open()
            doomed = self._holds.mark_deleted(self._index.unnamed())
            if doomed:
                try:
                    unused = self._index.drop(doomed)
                except BaseException:
                    self._holds.add(doomed)
                    raise
                self._leases.remove_unused(sorted(unused))
                self._quarantine.forget(doomed)
            return len(doomed)

    def remove_orphans(self, age_s: float = UNREFERENCED_BLOB_AGE_S) -> Swept:
        """Remove weights that were uploaded longer ago than this and are named by nothing still.

        Raises: StoreUnusable: the disk refused; the next call goes on.
        """
        # Thousands of files are looked at outside the lock, for which every request waits; what goes is few.
        old = self._blobs.older_than(age_s)
        with self._lock:
            self._check_open()
            self._index.settle()
            return self._blobs.remove_old(old - self._referenced() - self._leases.leased(), age_s)

    def _referenced(self) -> set[str]:
        with self._lock:
            self._check_open()
            return self._index.referenced_digests()

    def spec(self, key: AdapterKey) -> AdapterSpec:
        """What a content is, read from the header of its weights and checked against the base once more.

        Raises:
            AdapterNotFound: no version names it, and nobody held it, so that it was removed.
            AdapterCorrupt: its weights are damaged or gone.
            AdapterInvalid: this server's limits are tighter than those it was accepted under.
        """
        content = self._content(key)
        with self._quarantine.reading(key, content.weights_digest):
            return self._contents.spec(content)

    def load(self, key: AdapterKey, should_stop: Callable[[], bool] = lambda: False) -> AdapterWeights:
        """Read a content's weights; the digest is verified, and the spec checked, before anything is handed out.

        Raises:
            AdapterNotFound, AdapterCorrupt, AdapterInvalid: as `spec`.
            LoadCancelled: `should_stop` said so meanwhile.
        """
        content = self._content(key)
        with self._quarantine.reading(key, content.weights_digest):
            return self._contents.load(content, should_stop)

    def quarantined(self) -> frozenset[AdapterKey]:
        """Contents that were found damaged since the store opened. Their requests fail at once, without a look at the
        disk, until the same weights are uploaded again."""
        return self._quarantine.keys()

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
