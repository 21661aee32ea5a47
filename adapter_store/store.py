"""The adapter store: one folder, one owning process, safe to use from many threads.

A store may follow another, its origin: it gets names from the origin's feed and weights by digest, and refuses changes.

    root/lock              held while a server uses the store
    root/index.sqlite3     ids, versions, aliases, contents (`registry/index.py`)
    root/blobs, root/tmp   weights by digest (`storage/blobs.py`)
    root/snapshots         keys and values of fixed prompts, which can always be computed again (`storage/snapshots.py`)

Weights are read and hashed outside the lock. The index changes under it, in one transaction that makes the whole
change visible at once. Resolving a name reads a dictionary and never waits for a disk.
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

from adapter_store.composition import Compositions
from adapter_store.errors import (
    AdapterNotFound,
    BlobNotFound,
    BlobTooLarge,
    StoreFollows,
    StoreFull,
    StoreUnusable,
    VersionInUse,
)
from adapter_store.formats.composed import compose_specs, compose_weights
from adapter_store.formats.peft_dir import CHUNK_BYTES, digest_file
from adapter_store.formats.weights import AdapterWeights
from adapter_store.quota import ANONYMOUS, StoreQuota
from adapter_store.registry.added_tokens import AddedTokens
from adapter_store.registry.base_identity import BaseIdentity, bind_base
from adapter_store.registry.content_reader import ContentReader
from adapter_store.registry.feed_page import CONTENTS, FeedPage
from adapter_store.registry.garbage_collector import GarbageCollector
from adapter_store.registry.index import Content, Index, Upload
from adapter_store.registry.name_feed import Followed, NameFeed
from adapter_store.registry.names import Names, read_records
from adapter_store.registry.records import AdapterRecord, Change, Deletion, Registration, check_preconditions, usage_of
from adapter_store.registry.references import RESERVED_IDS, VERBS, Shares, check_adapter_id, check_alias, check_digest
from adapter_store.registry.version_history import VersionHistory
from adapter_store.spec import BF16, MAX_LORA_RANK, AdapterId, AdapterKey, AdapterRef, AdapterSpec, BaseShapes, Form
from adapter_store.storage.blob_cache import BlobCache, Origin
from adapter_store.storage.blobs import BlobDirectory, BlobUpload, disk_errors
from adapter_store.storage.leases import BlobLeases
from adapter_store.storage.pending_uploads import ANONYMOUS_UPLOADER, PendingUploads, Uploader
from adapter_store.storage.quarantine import Quarantine
from adapter_store.storage.refcounts import CompositionHold, ContentHold, ContentRefcounts
from adapter_store.storage.root_lock import lock_root, opening_errors
from adapter_store.storage.snapshots import SnapshotFiles, owner_of
from adapter_store.storage.unreferenced_blobs import UnreferencedBlobs
from adapter_store.validation.validate import max_adapter_bytes

IfMatch = Collection[str] | None
"""States of an id in which a change is applied (`records.check_preconditions`); None means any state."""
NO_QUOTA = StoreQuota()
CACHE_BYTES = 16 << 30
"""Bytes of weights that a follower keeps if its quota has no limit."""


class AdapterStore:
    """Store the adapters of one base across restarts. Every method may be called from any thread at any time.

    Args:
        root: the store's folder.
        base: shapes of the base that adapters must fit.
        max_lora_rank: highest rank accepted.
        reserved_ids: ids that no adapter may have; a follower hides adapters of its origin with such ids.
        quota: how much may be stored.
        draw: returns random numbers in [0, 1), for aliases that are split between versions.
        base_sample: numbers that identify the base's weights; if empty, weights are not compared.
        accept_base_change: accept a store of another base if every adapter fits this one.
        form: the form of new versions whose uploader names none.
        origin: the store to follow; the quota's bytes then limit the weights that are cached here.

    Raises:
        StoreLocked: another server has it open.
        StoreUnusable: it cannot be read or written, or was filled for another base (`registry/base_identity.py`).
    """

    def __init__(
        self,
        root: Path,
        base: BaseShapes,
        *,
        max_lora_rank: int = MAX_LORA_RANK,
        reserved_ids: frozenset[str] = frozenset(),
        quota: StoreQuota = NO_QUOTA,
        draw: Callable[[], float] = random.random,
        base_sample: Sequence[float] = (),
        accept_base_change: bool = False,
        form: Form = BF16,
        origin: Origin | None = None,
    ) -> None:
        self.root = root
        self._origin = origin
        self.form: Form = form
        self.base = base
        self.max_lora_rank = max_lora_rank
        self.max_blob_bytes = max_adapter_bytes(base, max_lora_rank)
        self._reserved = reserved_ids | VERBS
        self.quota = quota
        self._lock = threading.RLock()
        self._quarantine = Quarantine()
        self.compositions = Compositions()
        self._closed = False
        with contextlib.ExitStack() as undo, opening_errors(root):
            undo.callback(os.close, lock_root(root))
            self._blobs = self._open_blobs()
            self._index = Index(root / "index.sqlite3")
            self._unreferenced = UnreferencedBlobs(self._blobs, self._index.is_referenced)
            self.pending_uploads = PendingUploads(self._blobs, self._unreferenced, self._stored)
            self._content_reader = ContentReader(self._blobs, base, max_lora_rank, self._content)
            undo.callback(self._index.close)
            self._refcounts = ContentRefcounts(self._index.keys())
            self.version_history = VersionHistory(
                self._lock, self._index, self._blobs, self._check_open, self._check_owner
            )
            self._leases = BlobLeases(
                self._lock,
                self._blobs,
                self._check_open,
                self._index.may_reference,
                self.pending_uploads,
                self._unreferenced,
            )
            self.collector = GarbageCollector(
                self._lock,
                self._index,
                self._blobs,
                self._refcounts,
                self._leases,
                self.pending_uploads,
                self._unreferenced,
                self._quarantine,
                self._check_open,
            )
            self.added_tokens = AddedTokens(
                self._blobs, self._leases, self.pending_uploads, self.compositions, self._content, self._check_owner
            )
            records = read_records(self._index, self._reserved, follows=origin is not None)
            self._names = Names(records, draw)
            # Only an owner needs this: a follower registers nothing.
            self._usage = usage_of(records.values(), self._index.owners())
            identity = BaseIdentity.of(base, base_sample)
            follows = None if origin is None else origin.address
            self.feed = NameFeed(
                self._lock,
                self._index,
                self._names,
                self._refcounts,
                identity,
                self._reserved,
                follows,
                self._check_open,
            )
            bind_base(self._index, identity, self._content_reader.spec, accept_base_change)
            self.collector.collect()
            referenced = self._index.referenced_digests()
            self._blobs.sweep(referenced)
            self._unreferenced.recount(self._blobs.names() - referenced)
            self.snapshots = SnapshotFiles(root, self._owners)
            self._undo = undo.pop_all()

    def _open_blobs(self) -> BlobDirectory:
        if self._origin is None:
            return BlobDirectory(self.root)
        max_bytes = CACHE_BYTES if self.quota.store_bytes is None else self.quota.store_bytes
        return BlobCache(self.root, self._origin, max_bytes, self.max_blob_bytes, lambda: self.collector.held_digests())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the store for another server. Uploads in progress fail; weights already loaded stay usable.

        Raises:
            StoreFull, StoreUnusable: the disk failed; the store is closed nevertheless.
        """
        with self._lock, disk_errors("closing"):
            self._closed = True
            self._undo.close()

    def follow(self, page: FeedPage) -> Followed:
        """Apply a page of the origin's changes, as `NameFeed.take`."""
        self._blobs.keep_room()
        with self._lock:
            followed = self.feed.take(page)
            for name, versions in followed.gone.items():
                self.snapshots.remove_versions(name, versions)
            if page.is_last:
                with contextlib.suppress(StoreUnusable, StoreFull):
                    self.collector.collect()
        for _, digest, *_ in page.rows[CONTENTS]:
            # These weights were uploaded again, perhaps because they were damaged.
            self._quarantine.clear(digest)
        return followed

    def check_writable(self) -> None:
        """Check that the disk has room for uploads. Raises: StoreFull, StoreUnusable."""
        self._check_open()
        self._blobs.check_writable()

    def blob_exists(self, digest: str) -> bool:
        """Return whether weights of this digest are stored.

        Raises:
            InvalidDigest: not 64 hex digits.
        """
        return self._blobs.exists(check_digest(digest))

    def blob_path(self, digest: str) -> Path:
        """Return the path of weights, for another thread or process to read; they are removed when nothing needs them.

        Raises:
            InvalidDigest: not 64 hex digits.
            BlobNotFound: there are none of this digest.
        """
        if not self.blob_exists(digest):
            raise BlobNotFound(digest)
        return self._blobs.path(digest)

    def open_blob(self, digest: str, length: int, uploader: Uploader = ANONYMOUS_UPLOADER) -> BlobUpload:
        """Start an upload of `length` bytes whose SHA-256 is `digest`.

        Raises:
            InvalidDigest: not 64 hex digits.
            BlobTooLarge: no adapter of this base is that long.
            QuotaExceeded: too many uploaded bytes are without a version (`storage/pending_uploads.py`).
            StoreFull, StoreUnusable: the disk refused.
        """
        if length > self.max_blob_bytes:
            raise BlobTooLarge(length, self.max_blob_bytes)
        self._check_owner()
        return self.pending_uploads.open(check_digest(digest), length, self.quota.store_bytes, uploader)

    def add_blob(self, path: Path) -> str:
        """Copy a local weights file into the store and return its digest.

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
        if_match: IfMatch = None,
        principal: str = ANONYMOUS,
        max_bytes: int | None = None,
        is_known: bool = True,
        allow_partial: bool = False,
        stored: Form | None = None,
        allow_drift: bool = False,
        defaults: str = "",
        check_spec: Callable[[AdapterSpec], None] = lambda spec: None,
    ) -> Registration:
        """Check uploaded weights against the base and make them the current version of the id, and the target of the
        alias.

        A content that the id already has with these defaults keeps its version number; the id moves to it. If the
        check or the disk refuses, nothing is stored, and the weights are removed unless a version or another upload
        needs them.

        Args:
            adapter_id: the id to create or to add a version to.
            config: the adapter's config, as PEFT saves it.
            weights_digest: SHA-256 of the uploaded weights.
            if_not_exists: refuse an id that exists.
            alias: alias to point to the version.
            if_match: states the id may be in.
            principal: owner of a new version.
            max_bytes: limit of the principal's bytes, instead of the quota's.
            is_known: whether the principal may know that the weights exist; if not, they count as missing.
            allow_partial, allow_drift: accept modules without tensors, and any drift of the form "int8".
            stored: the form to keep the adapter in; None: the store's. Each form is a separate content.
            defaults: the version's defaults as JSON, which the caller has checked; "" if there are none.
            check_spec: raises AdapterInvalid if the defaults do not go with the checked weights.

        Raises:
            InvalidAdapterId, InvalidAlias, InvalidDigest, BlobNotFound: an argument is wrong; no weights were read.
            AdapterExists, AdapterChanged: the id is not as `if_not_exists` and `if_match` say.
            AdapterInvalid: with every problem found.
            AdapterCorrupt: the disk returned other bytes than were uploaded.
            QuotaExceeded: the principal, the store or the id would exceed a limit.
            StoreFull, StoreUnusable: the disk refused.
        """
        self._check_owner()
        name = check_adapter_id(adapter_id, self._reserved | RESERVED_IDS)
        digest = check_digest(weights_digest)
        if alias is not None:
            check_alias(alias)
        check_preconditions(name, self._names.find(name), if_match, if_not_exists=if_not_exists)
        with self._leases.lease(digest, is_known), self.pending_uploads.using(principal, digest):
            checked = self._content_reader.check(
                config, digest, allow_partial=allow_partial, stored=stored or self.form, allow_drift=allow_drift
            )
            check_spec(checked.spec)
            upload = Upload.of(config, digest, checked.report)
            with self._lock:
                self._check_open()
                check_preconditions(name, self._names.find(name), if_match, if_not_exists=if_not_exists)
                quota = self.quota.with_bytes(max_bytes)
                return self._add_version(name, upload, defaults=defaults, alias=alias, principal=principal, quota=quota)

    def register_defaults(
        self,
        adapter_id: str,
        defaults: str,
        weights_of: AdapterRef | None = None,
        *,
        if_not_exists: bool = False,
        alias: str | None = None,
        if_match: IfMatch = None,
        principal: str = ANONYMOUS,
        max_bytes: int | None = None,
    ) -> Registration:
        """Make a version with these defaults the id's current one, with another version's weights or without weights.

        Args:
            defaults: JSON, which the caller has checked.
            weights_of: the version of this id whose weights the new one has; None: no weights.

        Raises:
            AdapterNotFound: there is no such version any more.
            InvalidAdapterId, InvalidAlias, AdapterExists, AdapterChanged, QuotaExceeded, StoreFull, StoreUnusable: as
                `register`.
        """
        name = check_adapter_id(adapter_id, self._reserved | RESERVED_IDS)
        if alias is not None:
            check_alias(alias)
        with self._lock:
            self._check_owner()
            check_preconditions(name, self._names.find(name), if_match, if_not_exists=if_not_exists)
            upload = None
            if weights_of is not None and weights_of.key is not None:
                upload = self._index.upload(name, weights_of.version)
                if upload is None:
                    raise AdapterNotFound(f"{name}@{weights_of.version}")
            quota = self.quota.with_bytes(max_bytes)
            return self._add_version(name, upload, defaults=defaults, alias=alias, principal=principal, quota=quota)

    def _add_version(
        self,
        name: AdapterId,
        upload: Upload | None,
        *,
        alias: str | None,
        principal: str,
        quota: StoreQuota,
        defaults: str,
    ) -> Registration:
        weights = ("", 0) if upload is None else (upload.content.weights_digest, upload.report.weights_bytes)
        known = self._names.find(name)
        versions, aliases = ((), {}) if known is None else (known.versions, known.aliases)
        if alias is not None:
            quota.check_of_id(name, "aliases", aliases, {*aliases, alias})

        def admit() -> None:
            quota.check_of_id(name, "versions", versions, (*versions, None))
            quota.check(self._usage, principal, *weights)

        version, created, record = self._index.add_version(
            name, upload, time.time(), defaults=defaults, alias=alias, principal=principal, admit=admit
        )
        if created:
            self._usage.add(principal, *weights)
        if upload is not None:
            self._refcounts.add((upload.content.key,))
        self._names.replace(name, record)
        return Registration(record.ref(version), created, None if upload is None else upload.report)

    def resolve(self, reference: str, sticky_to: tuple[str, ...] = ()) -> AdapterRef:
        """Return the version that `mia`, `mia:prod`, `mia@3` or `mia@sha256:<12 or more digits of the key>` names now.

        Reads memory only. For an alias that is split between versions, each call draws one by their shares.

        Args:
            sticky_to: identifies the client. It gets the same version while the alias is split between the same two; as
                a share grows, only as many clients move as are needed. If empty, the draw is random.

        Raises:
            AdapterNotFound: there is none; the error has up to three similar ids.
        """
        return self._names.resolve(reference, sticky_to)

    def targets(self, reference: str) -> tuple[AdapterRecord, Shares]:
        """Return the id that `resolve` would find and the versions it could return, with their shares. Draws nothing.

        Raises:
            AdapterNotFound: there is none.
        """
        return self._names.targets(reference)

    def resolve_one(self, reference: str) -> AdapterRef:
        """Return the version that a reference names, refusing an alias that is split.

        Raises:
            AdapterNotFound: there is none.
            InvalidAlias: the alias is split between versions.
        """
        return self._names.resolve_one(reference)

    def list_adapters(self) -> list[AdapterRecord]:
        """Return every id, sorted."""
        return self._names.all()

    def records(self) -> Mapping[AdapterId, AdapterRecord]:
        """Return every id, unordered. The mapping is immutable; a change replaces it with a new one."""
        return self._names.records

    def get(self, adapter_id: str) -> AdapterRecord:
        """Return an id's record.

        Raises:
            AdapterNotFound: there is no such id.
        """
        return self._names.get(adapter_id)

    def limits(self, adapter_id: str) -> Mapping[str, float]:
        """Return the limits of an id, empty if there is no such id. Reads memory only."""
        record = self._names.find(adapter_id)
        return record.limits if record is not None else {}

    def change(self, adapter_id: str, change: Change, *, if_match: IfMatch = None) -> AdapterRecord:
        """Apply a change to an id, completely or not at all, and return the new record.

        A change moves the id to another of its versions, sets, moves or removes aliases, and replaces limits.
        Requests resolved earlier keep their version.

        Raises:
            AdapterNotFound: there is no such id.
            VersionNotFound: it has no such version.
            InvalidAlias: an alias's name or target is invalid.
            AdapterChanged: the id is not in one of the states of `if_match`.
            QuotaExceeded: it would have too many aliases.
            StoreFull, StoreUnusable: the disk refused; nothing changed.
        """
        change.check()
        with self._lock:
            self._check_owner()
            record = self.get(adapter_id)
            check_preconditions(adapter_id, record, if_match)
            change.check_versions(record)
            self.quota.check_of_id(adapter_id, "aliases", record.aliases, change.aliases_after(record))
            changed = self._index.change(record.adapter_id, change)
            self._names.replace(record.adapter_id, changed)
            return changed

    def is_named(self, key: AdapterKey) -> bool:
        """Return whether any version refers to this content."""
        with self._lock:
            self._check_open()
            return self._index.is_named(key)

    def delete(self, reference: str, *, force: bool = False, if_match: IfMatch = None) -> Deletion:
        """Remove an id, or the version or content that the reference pins.

        The id moves to its highest remaining version. Weights that no version refers to are removed once nothing
        holds them; what is in memory stays usable. Version numbers are never reused.

        Raises:
            AdapterNotFound: there is nothing of that name.
            InvalidAlias: it is an alias; `change` removes those.
            AdapterChanged: the id is not in one of the states of `if_match`.
            VersionInUse: an alias points to it; `force` removes the alias too.
        """
        with self._lock:
            self._check_owner()
            record, selected = self._names.select(reference)
            check_preconditions(record.adapter_id, record, if_match)
            versions = frozenset(v.version for v in selected)
            aliases = record.aliases_of(versions)
            if aliases and not force:
                raise VersionInUse(reference, record.adapter_id, aliases)
            owners = self._index.owners(record.adapter_id)
            left, unnamed = self._index.delete_versions(record, versions)
            self._names.replace(record.adapter_id, left)
            for v in selected:
                owner = owners.get((record.adapter_id, v.version), ANONYMOUS)
                self._usage.remove(owner, v.weights_digest, v.bytes)
            self.snapshots.remove_versions(record.adapter_id, versions)
            # The deletion is committed, whether or not the weights can be removed now.
            with contextlib.suppress(StoreUnusable, StoreFull):
                self.collector.collect()
            contents = tuple(dict.fromkeys(v.key for v in selected if v.key is not None))
            gone = tuple(filter(unnamed.__contains__, contents))
            return Deletion(record.adapter_id, tuple(sorted(versions)), contents, gone, aliases)

    def hold(self, key: AdapterKey) -> ContentHold | CompositionHold:
        """Keep a content, or all contents of a sum, on disk while the returned object lives, even if it is deleted.

        Raises:
            AdapterNotFound: it is already removed.
            AdapterCorrupt: it is in quarantine.
        """
        composition = self.compositions.find(key)
        if composition is None:
            return self._hold(key)
        return CompositionHold(key, composition, [self._hold(part) for part, _ in composition.weights])

    def _hold(self, key: AdapterKey) -> ContentHold:
        # Does not take the store's lock, which is held during commits: `ContentRefcounts` orders holds and deletions.
        self._check_open()
        hold = self._refcounts.acquire(key)
        self._quarantine.check(key)
        return hold

    def _stored(self, digest: str) -> None:
        self._quarantine.clear(digest)
        # The weights are stored, even if the index fails now or was closed meanwhile.
        with self._lock, contextlib.suppress(StoreUnusable, StoreFull):
            self._unreferenced.recount((digest,))

    def _owners(self) -> set[str]:
        return {owner_of(name, v.version) for name, record in self._names.records.items() for v in record.versions}

    def spec(self, key: AdapterKey) -> AdapterSpec:
        """Return the spec of a content, or of a sum, read from the header of its weights and checked against the base
        again.

        Raises:
            NotComposable: the sum cannot be served.
            AdapterNotFound: it was removed.
            AdapterCorrupt: its weights are damaged or missing.
            AdapterInvalid: this server's limits are tighter than those it was accepted under.
        """
        composition = self.compositions.find(key)
        if composition is not None:
            return compose_specs(composition, self.spec, self.max_lora_rank)
        content = self._content(key)
        with self._quarantine.reading(key, content.weights_digest):
            return self._content_reader.spec(content)

    def load(self, key: AdapterKey, should_stop: Callable[[], bool] = lambda: False) -> AdapterWeights:
        """Read the weights of a content, or of a sum, verifying digests and checking the spec before anything is
        returned.

        Raises:
            NotComposable, AdapterNotFound, AdapterCorrupt, AdapterInvalid: as `spec`.
            LoadCancelled: `should_stop` returned True during the read.
        """
        composition = self.compositions.find(key)
        if composition is not None:
            return compose_weights(composition, self.spec(key), lambda part: self.load(part, should_stop))
        content = self._content(key)
        with self._quarantine.reading(key, content.weights_digest):
            return self._content_reader.load(content, should_stop)

    def quarantined(self) -> frozenset[AdapterKey]:
        """Return the contents found damaged since the store opened.

        Their requests fail at once, without reading the disk, until the same weights are uploaded again.
        """
        return self._quarantine.keys()

    def _content(self, key: AdapterKey) -> Content:
        with self._lock:
            self._check_open()
            content = self._index.content(key)
        if content is None:
            raise AdapterNotFound(key)
        return content

    def _check_owner(self) -> None:
        """Check that changes may be made here.

        Raises:
            StoreFollows: this store follows another; changes must be sent to the origin.
            OriginUnreachable: this store follows another, and the origin cannot be reached now.
        """
        self._check_open()
        if self._origin is not None:
            self._origin.check()
            raise StoreFollows(self._origin.address)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnusable("the store is closed")
