"""A storage from which many simulated loaders read; its reads share the bandwidth equally. Torch-free."""

from collections.abc import Callable


class SharedStorage:
    """Count the reads of a storage. The more there are, the slower each is.

    Args:
        bytes_per_s: bandwidth of all reads together.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._byte_s = 1.0 / bytes_per_s
        self._settles: list[Callable[[float], None]] = []
        self.num_reads = 0
        self._has_changed = False

    @property
    def read_byte_s(self) -> float:
        """Return the seconds per byte of each read now."""
        return self._byte_s * self.num_reads

    def attach(self, settle: Callable[[float], None]) -> None:
        """Register a loader: `settle` is called with the time before the rate changes, to count the bytes read at the
        old rate."""
        self._settles.append(settle)

    def detach(self, settle: Callable[[float], None]) -> None:
        """Unregister a loader."""
        self._settles.remove(settle)

    def change(self, now_s: float, reads: int) -> None:
        """Note that `reads` reads have begun, or ended if it is negative."""
        for settle in self._settles:
            settle(now_s)
        self.num_reads += reads
        self._has_changed = True

    def take_changed(self) -> bool:
        """Return whether the rate, and so the end of every read, has changed since the last call."""
        changed, self._has_changed = self._has_changed, False
        return changed
