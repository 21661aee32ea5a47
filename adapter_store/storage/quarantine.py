"""Quarantine of contents whose weights were read back damaged, until the same file is uploaded again."""

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey

_LOG = logging.getLogger(__name__)


class Quarantine:
    """Record which contents must not be read and why, for the life of the process. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[AdapterKey, tuple[str, str]] = {}
        self._num_repairs = 0

    def check(self, key: AdapterKey) -> None:
        """Check that a content may be read.

        Raises:
            AdapterCorrupt: it is in quarantine; the message says why.
        """
        if found := self._why.get(key):
            raise AdapterCorrupt(found[1])

    @contextlib.contextmanager
    def reading(self, key: AdapterKey, digest: str) -> Iterator[None]:
        """Wrap a read of a content whose weights have this digest; a failed read quarantines the content.

        Raises:
            AdapterCorrupt: the content was in quarantine, or the block raised it.
        """
        self.check(key)
        num_repairs = self._num_repairs
        try:
            yield
        except AdapterCorrupt as error:
            with self._lock:
                # A file uploaded during the read may be intact: let the next read decide.
                if num_repairs == self._num_repairs:
                    self._why[key] = (digest, str(error))
            _LOG.error("adapter sha256:%s is in quarantine: %s", key[:12], error)
            raise

    def clear(self, digest: str) -> None:
        """Allow reads of contents whose weights were written again."""
        with self._lock:
            self._num_repairs += 1
            self._why = {key: why for key, why in self._why.items() if why[0] != digest}

    def keys(self) -> frozenset[AdapterKey]:
        """Return the contents in quarantine."""
        with self._lock:
            return frozenset(self._why)

    def forget(self, keys: Collection[AdapterKey]) -> None:
        """Drop contents that were removed from the store."""
        with self._lock:
            self._why = {key: why for key, why in self._why.items() if key not in keys}
