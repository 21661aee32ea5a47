"""Read stored contents: the spec from the header of the weights, and the weights themselves."""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from typing import Any

from cachetools import LRUCache

from adapter_store.errors import AdapterCorrupt, AdapterInvalid, BlobNotFound
from adapter_store.formats.safetensors_file import (
    LENGTH_BYTES,
    SafetensorsHeader,
    header_cap_bytes,
    parse_header,
    read_header,
)
from adapter_store.formats.weights import AdapterWeights, read_verified, weights_from_bytes
from adapter_store.registry.index import Content
from adapter_store.spec import AdapterKey, AdapterSpec, BaseShapes
from adapter_store.storage.blobs import BlobDirectory, disk_errors
from adapter_store.validation.validate import CheckedAdapter, check_adapter, validate_adapter

NUM_NEWEST_CHECKED = 64


@dataclass(frozen=True, slots=True)
class _Checked:
    """Keep the beginning of a weights file and what was read from it."""

    header_bytes: bytes
    header: SafetensorsHeader
    spec: AdapterSpec


class ContentReader:
    """Read contents that are in the index. Safe to use from many threads.

    Args:
        blobs: the weights.
        base: shapes that adapters must fit.
        max_lora_rank: highest rank accepted.
        find: returns a content by its key; raises AdapterNotFound if it was deleted.
    """

    def __init__(
        self, blobs: BlobDirectory, base: BaseShapes, max_lora_rank: int, find: Callable[[AdapterKey], Content]
    ) -> None:
        self._blobs = blobs
        self._base = base
        self._max_lora_rank = max_lora_rank
        self._find = find
        self._lock = threading.Lock()
        self._newest: LRUCache[AdapterKey, _Checked] = LRUCache(NUM_NEWEST_CHECKED)

    def check(self, config: Mapping[str, object], digest: str, **terms: Any) -> CheckedAdapter:
        """Check whether a blob and a config are an adapter of this base; `terms` as in `check_adapter`.

        Raises:
            AdapterInvalid: with every problem found.
            AdapterCorrupt: the disk returned other bytes than were uploaded.
        """
        with self._blobs.open(digest) as file, disk_errors("reading weights"):
            size = os.fstat(file.fileno()).st_size
            checked = check_adapter(config, file, size, self._base, self._max_lora_rank, **terms)
        if checked.spec.weights_digest != digest:
            raise AdapterCorrupt(f"stored weights sha256:{digest[:12]} are damaged; upload the same file again")
        return checked

    def spec(self, content: Content) -> AdapterSpec:
        """Return a content's spec, as `AdapterStore.spec`."""
        return self._checked(content).spec

    def load(self, content: Content, should_stop: Callable[[], bool]) -> AdapterWeights:
        """Return a content's weights, as `AdapterStore.load`."""
        try:
            return self._load(content, should_stop)
        except AdapterCorrupt:
            if not self._blobs.drop_damaged(content.weights_digest):
                raise
        with self._lock:
            self._newest.pop(content.key, None)
        return self._load(content, should_stop)

    def _load(self, content: Content, should_stop: Callable[[], bool]) -> AdapterWeights:
        checked = self._checked(content)
        with self._open(content) as file, disk_errors("reading weights"):
            data = read_verified(file, content.weights_digest, should_stop)
        if data[: len(checked.header_bytes)] == checked.header_bytes:
            return weights_from_bytes(data, checked.header, checked.spec)
        # These bytes match the digest, so the header cached earlier was misread.
        header = parse_header(data, header_cap_bytes(self._base))
        return weights_from_bytes(data, header, self._spec_of(content, header))

    def _checked(self, content: Content) -> _Checked:
        """Return the checked header, caching the newest: a check takes 10 ms, and a load needs it twice."""
        with self._lock:
            known = self._newest.get(content.key)
        if known is None:
            known = self._check(content)
            with self._lock:
                self._newest[content.key] = known
        return known

    def _check(self, content: Content) -> _Checked:
        cap = header_cap_bytes(self._base)
        with self._open(content) as file, disk_errors("reading weights"):
            try:
                start = file.read(LENGTH_BYTES + cap)
                header = read_header(BytesIO(start), os.fstat(file.fileno()).st_size, cap)
                return _Checked(start[: header.data_start], header, self._spec_of(content, header))
            except AdapterInvalid:
                file.seek(0)
                read_verified(file, content.weights_digest)
                raise

    def _open(self, content: Content) -> BufferedReader:
        try:
            return self._blobs.open(content.weights_digest)
        except BlobNotFound:
            self._find(content.key)  # if the content was deleted meanwhile, report that instead of corruption
            digest = content.weights_digest[:12]
            raise AdapterCorrupt(f"stored weights sha256:{digest} are gone; upload the same file again") from None

    def _spec_of(self, content: Content, header: SafetensorsHeader) -> AdapterSpec:
        digest = content.weights_digest
        spec = validate_adapter(
            content.config,
            header,
            self._base,
            self._max_lora_rank,
            weights_digest=digest,
            stored=content.stored,
        )
        if spec.key != content.key:
            raise AdapterCorrupt(f"the index and the weights of sha256:{digest[:12]} disagree; upload it again")
        return spec
