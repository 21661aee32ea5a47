"""Export of a closed store to an archive and import from one; nothing in an archive is trusted without verification.

The archive is a plain tar (ustar) of regular files, and members are never extracted to the names they give. Python's
`tarfile` packs and parses the 512 byte headers; its handling of extended headers and links, which an untrusted
archive could exploit, is not used.
"""

import hashlib
import json
import os
import tarfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO

from adapter_store.errors import (
    AdapterCorrupt,
    AdapterInvalid,
    InvalidArchive,
    StoreFull,
    StoreUnusable,
    show,
)
from adapter_store.maintenance.archive_format import (
    BLOBS,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Archive,
    ArchivedContent,
    ArchivedUpload,
    read_manifest_json,
)
from adapter_store.maintenance.archive_refusals import CheckDefaults, CheckLimits, CheckTokens, Refusals
from adapter_store.maintenance.offline_store import OfflineStore, Progress
from adapter_store.registry.base_identity import BaseIdentity, stored_base
from adapter_store.registry.index import Upload
from adapter_store.registry.references import VERBS, check_adapter_id, check_digest
from adapter_store.spec import AdapterId, AdapterKey, BaseShapes
from adapter_store.storage.blobs import BlobUpload, disk_errors
from adapter_store.validation.validate import check_adapter, max_adapter_bytes

CHUNK_BYTES = 1 << 20


def tar_header(name: str, num_bytes: int) -> bytes:
    """Return the block before a member's data, of any size (ustar's own limit is 8 GiB)."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    return info.tobuf(tarfile.GNU_FORMAT)


def tar_padding(num_bytes: int) -> bytes:
    """Return the bytes between a member's data and the next block."""
    return bytes(-num_bytes % tarfile.BLOCKSIZE)


TAR_END = bytes(2 * tarfile.BLOCKSIZE)
_NO_ARCHIVE = "this is not a tar file that lorasrv store export wrote"


class TarReader:
    """Read members from a stream, in order. Each member's data must be read before the next one is requested.

    Raises:
        InvalidArchive: from every method: not a tar, truncated, or a member that is not a regular file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def next_member(self) -> tuple[str, int] | None:
        """Return the name of the next member and its number of bytes, or None at the end."""
        block = self._file.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise InvalidArchive(f"{_NO_ARCHIVE}, or it ends early; copy it again")
        if not any(block):
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise InvalidArchive(f"{_NO_ARCHIVE}, or it is damaged") from None
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.size < 0:
            raise InvalidArchive(f"member {show(info.name)} of the archive is not a regular file; nothing was imported")
        return info.name, info.size

    def data(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the data of the last returned member, in chunks."""
        left = num_bytes
        while left:
            chunk = self._read(min(left, CHUNK_BYTES))
            left -= len(chunk)
            yield chunk
        self._read(len(tar_padding(num_bytes)))

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise InvalidArchive("the archive ends early; copy it again")
        return data


SHOWN_IDS = 5


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """Count what was written to an archive, or imported from one."""

    adapters: int
    versions: int
    blobs: int
    bytes: int


def export_store(store: OfflineStore, file: BinaryIO, progress: Progress = lambda done, total: None) -> ArchiveSummary:
    """Write every version and the contents that versions refer to, verifying the digests.

    Raises:
        AdapterCorrupt: weights are damaged or missing; the message names the versions that use them.
        StoreUnusable: the store has more than an archive can hold.
        OSError: the file cannot be written.
    """
    archive = _archive_of(store)
    manifest = archive.to_json()
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise StoreUnusable(
            f"the configs and defaults of its versions have {len(manifest)} bytes, and an archive takes "
            f"{MAX_MANIFEST_BYTES}: copy the folder instead"
        )
    file.write(tar_header(MANIFEST, len(manifest)) + manifest + tar_padding(len(manifest)))
    done, total = 0, sum(archive.blobs.values())
    progress(done, total)
    for digest, num_bytes in archive.blobs.items():
        _write_blob(store, digest, num_bytes, file)
        done += num_bytes
        progress(done, total)
    file.write(TAR_END)
    return _summary(archive)


def _archive_of(store: OfflineStore) -> Archive:
    sizes, users = store.blobs.sizes(), store.index.versions_by_digest()
    contents, uploads = {}, {}
    for adapter_id, version, upload in store.index.uploads():
        key, digest = upload.content.key, upload.content.weights_digest
        if digest not in sizes:
            raise _damaged(users[digest], "missing")
        contents[key] = ArchivedContent(key, digest, sizes[digest], upload.content.stored)
        uploads[adapter_id, version] = ArchivedUpload(key, upload.config, upload.report.is_partial)
    index = store.index
    records = tuple(index.records().values())
    of_base = index.base() or ""
    return Archive(of_base, contents, records, uploads, index.last_versions(), index.owners(), index.all_defaults())


def _write_blob(store: OfflineStore, digest: str, num_bytes: int, file: BinaryIO) -> None:
    file.write(tar_header(BLOBS + digest, num_bytes))
    hasher = hashlib.sha256()
    written = 0
    with store.blobs.open(digest) as blob:
        while chunk := blob.read(CHUNK_BYTES):
            hasher.update(chunk)
            written += len(chunk)
            file.write(chunk)
    if written != num_bytes or hasher.hexdigest() != digest:
        raise _damaged(store.index.versions_by_digest()[digest], "damaged")
    file.write(tar_padding(num_bytes))


def _damaged(versions: list[str], how: str) -> AdapterCorrupt:
    return AdapterCorrupt(
        f"the weights of {', '.join(versions)} are {how}; upload the same file again, or remove them, then export"
    )


def import_store(
    store: OfflineStore,
    file: BinaryIO,
    base: BaseShapes,
    max_lora_rank: int,
    progress: Progress = lambda done, total: None,
    check_limits: CheckLimits = dict,
    check_defaults: CheckDefaults = lambda defaults, config: (),
    check_tokens: CheckTokens = lambda defaults, vocab_size: None,
    skip: Callable[[AdapterId, str], object] | None = None,
) -> ArchiveSummary:
    """Add the contents of an archive to a store.

    Every digest is verified, and every adapter that was not refused earlier is validated against the base again. Ids,
    versions, aliases and limits become visible together, or not at all.

    Args:
        store: the store to add to.
        file: the archive.
        base: shapes that adapters must fit.
        max_lora_rank: highest rank accepted.
        progress: called with the bytes of weights done and in total.
        check_limits: raises ValueError or TypeError for invalid limits of an id.
        check_defaults: raises ValueError for invalid defaults of a version; called with them as JSON and the config of
            the version's weights ({} without weights). Returns the parts of a stored sum.
        check_tokens: raises AdapterInvalid for invalid defaults of a version whose weights have another number of
            tokens than the base; called with the defaults and that number.
        skip: called with each refused adapter and the reason; the others are imported. If None, a refused adapter
            refuses the whole archive.

    Raises:
        AdaptersRefused: limits, defaults or weights of some adapters cannot be served, and `skip` is None.
        InvalidArchive: it is not an archive, is damaged, was made for another base, or holds ids that the store has
            already.
        InvalidAdapterId, DigestMismatch: an id of the archive is invalid, or weights do not match their digest.
        StoreFull, StoreUnusable: the disk refused, or the store holds adapters of another base.
    """
    if store.index.position() is not None:
        raise StoreUnusable("it is the cache of a server that follows a registry; import into the registry's folder")
    reader = TarReader(file)
    archive = _read_manifest(reader)
    _check_fits(archive, store, base)
    max_bytes, index = max_adapter_bytes(base, max_lora_rank), store.index
    refusals = Refusals(archive, check_limits, check_defaults, max_bytes, index.records(), index.last_versions())
    refusals.settle(skip)
    left = archive.without(refusals.reasons)
    with ExitStack() as undo:
        added = _import_blobs(reader, archive.blobs, left.blobs, store, undo, progress)
        uploads = _validate_uploads(left, store, base, max_lora_rank, check_tokens, refusals.add)
        refusals.settle(skip)
        kept = archive.without(refusals.reasons)
        _bind_base(archive, store)
        uploads = {at: uploads[at] for at in kept.uploads}
        store.index.restore(kept.records, uploads, kept.last_versions, kept.owners, kept.defaults)
        undo.pop_all()
    with suppress(StoreUnusable, StoreFull):
        # If this is not reached, the next garbage collection removes them.
        store.blobs.remove([digest for digest in added if digest not in kept.blobs])
    return _summary(kept)


def _read_manifest(reader: TarReader) -> Archive:
    first = reader.next_member()
    if first is None or first[0] != MANIFEST:
        raise InvalidArchive(f"this is not an archive of an adapter store: it does not begin with {MANIFEST}")
    if first[1] > MAX_MANIFEST_BYTES:
        raise InvalidArchive(f"the archive's manifest has {first[1]} bytes; {MAX_MANIFEST_BYTES} are the most")
    return read_manifest_json(b"".join(reader.data(first[1])))


def _bind_base(archive: Archive, store: OfflineStore) -> None:
    """Bind an empty store to the archive's base; check that any other store has the same base."""
    theirs, ours = BaseIdentity.from_text(archive.base), stored_base(store.index)
    if store.index.is_empty():
        store.index.bind_base(archive.base)
    elif not (ours.has_shapes_of(theirs) and ours.has_weights_of(theirs)):
        raise InvalidArchive("the store holds adapters of another base; import into a folder of its own")


def _check_fits(archive: Archive, store: OfflineStore, base: BaseShapes) -> None:
    if archive.records and not BaseIdentity.from_text(archive.base).has_shapes_of(BaseIdentity.of(base)):
        raise InvalidArchive(
            f"the archive's adapters were checked for a base of other shapes than this {base.family} model (--model)"
        )
    for record in archive.records:
        check_adapter_id(record.adapter_id, VERBS | {base.name})
    if taken := sorted(store.index.records().keys() & {record.adapter_id for record in archive.records}):
        dots = ", …" if len(taken) > SHOWN_IDS else ""
        raise InvalidArchive(
            f"the store has {', '.join(taken[:SHOWN_IDS])}{dots} already; remove them first, or import into an empty "
            "folder. Nothing was imported"
        )


def _import_blobs(
    reader: TarReader,
    announced: Mapping[str, int],
    wanted: Collection[str],
    store: OfflineStore,
    undo: ExitStack,
    progress: Progress,
) -> list[str]:
    """Write each wanted blob under its digest; a member's name only announces the digest, which is verified.

    Returns:
        The digests that the store did not have.
    """
    awaited, added = dict(announced), list[str]()
    undo.callback(_remove, store, added)
    done, total = 0, sum(awaited.values())
    progress(done, total)

    def counted(chunks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            progress(done, total)

    while (member := reader.next_member()) is not None:
        name, num_bytes = member
        digest = name.removeprefix(BLOBS)
        if BLOBS + digest != name or awaited.get(digest) != num_bytes:
            raise InvalidArchive(
                f"member {show(name)} of the archive is not announced by its manifest, or appears twice"
            )
        del awaited[digest]
        chunks = counted(reader.data(num_bytes))
        if digest not in wanted:
            deque(chunks, maxlen=0)
            continue
        if not store.blobs.exists(digest):
            added.append(digest)
        with BlobUpload(store.blobs, check_digest(digest), num_bytes) as upload:
            for chunk in chunks:
                upload.write(chunk)
            upload.commit()
    if awaited:
        raise InvalidArchive(f"the archive lacks {len(awaited)} of the blobs that its manifest announces")
    return added


def _remove(store: OfflineStore, digests: Sequence[str]) -> None:
    """Remove the weights of a failed import, unless a crash could restore references to them; in that case the next
    garbage collection removes them.
    """
    with suppress(StoreUnusable, StoreFull):
        store.index.discard_failed_commit()
        store.blobs.remove(digests)


def _validate_uploads(
    archive: Archive,
    store: OfflineStore,
    base: BaseShapes,
    max_lora_rank: int,
    check_tokens: CheckTokens,
    refuse: Callable[[AdapterId, str], object],
) -> dict[tuple[AdapterId, int], Upload]:
    """Check every version as at its upload, reading weights only once for versions with the same content and config."""
    uploads: dict[tuple[AdapterId, int], Upload] = {}
    known: dict[tuple[AdapterKey, bool, str], tuple[Upload, int]] = {}
    for at, archived in archive.uploads.items():
        identity = archived.key, archived.is_partial, json.dumps(archived.config)
        try:
            if identity not in known:
                known[identity] = _check_upload(archived, archive.contents[archived.key], store, base, max_lora_rank)
            uploads[at], vocab_size = known[identity]
            if vocab_size and at in archive.defaults:
                check_tokens(archive.defaults[at], vocab_size)
        except AdapterInvalid as error:
            refuse(at[0], f"{at[0]}@{at[1]}: {error}")
    return uploads


def _check_upload(
    archived: ArchivedUpload, content: ArchivedContent, store: OfflineStore, base: BaseShapes, max_lora_rank: int
) -> tuple[Upload, int]:
    """Return the upload and the weights' number of tokens, 0 for as many as the base has."""
    with store.blobs.open(content.weights_digest) as file, disk_errors("reading weights"):
        size = os.fstat(file.fileno()).st_size
        # The uploader accepted the drift; the new report has the warning again.
        checked = check_adapter(
            archived.config,
            file,
            size,
            base,
            max_lora_rank,
            allow_partial=archived.is_partial,
            stored=content.stored,
            allow_drift=True,
        )
    if checked.spec.weights_digest != content.weights_digest or checked.spec.key != content.key:
        raise InvalidArchive(f"content {content.key[:12]} of the archive does not match its config and weights")
    return Upload.of(archived.config, content.weights_digest, checked.report), checked.spec.vocab_size


def _summary(archive: Archive) -> ArchiveSummary:
    versions = sum(len(record.versions) for record in archive.records)
    return ArchiveSummary(len(archive.records), versions, len(archive.blobs), sum(archive.blobs.values()))
