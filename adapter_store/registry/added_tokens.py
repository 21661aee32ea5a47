"""Tokens that adapters add to the base's: read from an upload's tokenizer.json, and stored with the content."""

import hashlib
from collections.abc import Callable

from adapter_store.composition import Compositions
from adapter_store.errors import AdapterCorrupt, AdapterInvalid, Problem, ProblemList
from adapter_store.formats.adapter_config import read_added_tokens
from adapter_store.quota import ANONYMOUS
from adapter_store.registry.index import Content
from adapter_store.registry.references import check_digest
from adapter_store.spec import AdapterKey, AddedToken
from adapter_store.storage.blobs import BlobDirectory, disk_errors
from adapter_store.storage.leases import BlobLeases
from adapter_store.storage.pending_uploads import PendingUploads


class AddedTokens:
    """Read the tokens that adapters add. Safe to use from many threads.

    Args:
        blobs: weights, and tokenizers until they are read.
        leases: keep a blob while it is read.
        pending_uploads: tells which principal's uploads are pending.
        compositions: sums, which add no tokens.
        find: returns a content by its key; raises AdapterNotFound if it was deleted.
        check_owner: raises StoreFollows where changes are made elsewhere, or StoreUnusable once the store is closed.
    """

    def __init__(
        self,
        blobs: BlobDirectory,
        leases: BlobLeases,
        pending_uploads: PendingUploads,
        compositions: Compositions,
        find: Callable[[AdapterKey], Content],
        check_owner: Callable[[], None],
    ) -> None:
        self._blobs, self._leases, self._pending_uploads = blobs, leases, pending_uploads
        self._compositions, self._find, self._check_owner = compositions, find, check_owner

    def of(self, key: AdapterKey) -> tuple[AddedToken, ...]:
        """Return the tokens that a content adds, which were checked at its upload; a sum adds none.

        Raises:
            AdapterNotFound: it was removed.
        """
        if self._compositions.find(key) is not None:
            return ()
        return tuple(read_added_tokens(self._find(key).config, ProblemList()))

    def read_upload(self, digest: str, max_bytes: int, *, principal: str = ANONYMOUS, is_known: bool = True) -> bytes:
        """Return the tokenizer that was uploaded under a digest; the upload is no longer pending afterwards.

        Args:
            is_known: as in `AdapterStore.register`.

        Raises:
            InvalidDigest, BlobNotFound: there is no such upload.
            AdapterInvalid: it has more bytes than `max_bytes`.
            AdapterCorrupt: the disk returned other bytes than were uploaded.
            StoreUnusable: the disk refused.
        """
        self._check_owner()
        digest = check_digest(digest)
        with (
            self._leases.lease(digest, is_known),
            self._pending_uploads.using(principal, digest),
            self._blobs.open(digest) as file,
            disk_errors("reading an upload"),
        ):
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            what = f"has more than {max_bytes} bytes, which are the most"
            raise AdapterInvalid((Problem("upload_too_large", f"sha256:{digest[:12]}", what),))
        if hashlib.sha256(content).hexdigest() != digest:
            raise AdapterCorrupt(f"sha256:{digest[:12]} is damaged on the disk; upload the same file again")
        return content
