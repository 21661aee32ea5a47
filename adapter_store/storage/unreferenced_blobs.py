"""Bytes of stored weights that no content refers to: a running sum, so that no upload needs to count files."""

from collections.abc import Callable, Iterable

from adapter_store.storage.blobs import BlobDirectory


class UnreferencedBlobs:
    """Sum the bytes of blobs that no content refers to, and of foreign files found when the store was opened.

    Code that changes a blob, or the references to it, must call `recount` for it, holding the store's lock.

    Args:
        blobs: the weights.
        is_referenced: returns whether a content refers to a digest.
    """

    def __init__(self, blobs: BlobDirectory, is_referenced: Callable[[str], bool]) -> None:
        self._blobs = blobs
        self._is_referenced = is_referenced
        self._sizes: dict[str, int] = {}
        # Files that have changed since they were counted.
        self._changed: set[str] = set()
        self.num_bytes = 0

    def recount(self, names: Iterable[str]) -> None:
        """Count these files as they are now, and those that an earlier call could not count.

        Raises:
            StoreUnusable: a file's size cannot be read; the next call counts the remaining files.
        """
        self._changed.update(names)
        for name in list(self._changed):
            size = 0 if self._is_referenced(name) else self._blobs.size(name)
            self.num_bytes += size - self._sizes.pop(name, 0)
            if size:
                self._sizes[name] = size
            self._changed.remove(name)
