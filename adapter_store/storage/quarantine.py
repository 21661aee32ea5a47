"""Contents whose weights the disk gave back damaged: nobody reads them again until the same file is uploaded."""

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey

_LOG = logging.getLogger(__name__)


class Quarantine:
    """Why which content is not read any more. Lives as long as the process; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: dict[AdapterKey, tuple[str, str]] = {}
        self._num_repairs = 0

    def check(self, key: AdapterKey) -> None:
        """Raises: AdapterCorrupt: it is in quarantine; says what was found."""
        if found := self._why.get(key):
            raise AdapterCorrupt(found[1])

    @contextlib.contextmanager
    def reading(self, key: AdapterKey, digest: str) -> Iterator[None]:
        """Around every read of a content, whose weights have this digest; it is not entered for one in quarantine.

        Raises: AdapterCorrupt: it is, or is now, because the block raised it.
        """
        self.check(key)
        num_repairs = self._num_repairs
        try:
            yield
        except AdapterCorrupt as error:
            with self._lock:
                # A file that was uploaded meanwhile may be whole: the next read tells.
                if num_repairs == self._num_repairs:
                    self._why[key] = (digest, str(error))
            _LOG.error("adapter sha256:%s is in quarantine: %s", key[:12], error)
            raise

    def repaired(self, digest: str) -> None:
        """Weights were written anew: what has them may be read again."""
        with self._lock:
            self._num_repairs += 1
            self._why = {key: why for key, why in self._why.items() if why[0] != digest}

    def keys(self) -> frozenset[AdapterKey]:
        """What is in quarantine now."""
        with self._lock:
            return frozenset(self._why)

    def forget(self, keys: Collection[AdapterKey]) -> None:
        """Contents that were removed are not in quarantine either."""
        with self._lock:
            self._why = {key: why for key, why in self._why.items() if key not in keys}
