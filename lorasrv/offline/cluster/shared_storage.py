"""One storage that many simulated loaders read from, with a bandwidth that its reads share equally. Torch-free."""

from collections.abc import Callable


class SharedStorage:
    """Count the reads of a storage. The more there are, the slower each is.

    Args:
        bytes_per_s: of all reads together.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._byte_s = 1.0 / bytes_per_s
        self._settles: list[Callable[[float], None]] = []
        self.num_reads = 0
        self._has_changed = False

    @property
    def read_byte_s(self) -> float:
        """Return the seconds that a byte of each read takes now."""
        return self._byte_s * self.num_reads

    def attach(self, settle: Callable[[float], None]) -> None:
        """Take part: `settle` is called with the time before the rate changes, to count what was read at the old."""
        self._settles.append(settle)

    def detach(self, settle: Callable[[float], None]) -> None:
        """Take part no more."""
        self._settles.remove(settle)

    def change(self, now_s: float, reads: int) -> None:
        """Note that `reads` reads have begun, or ended where it is negative."""
        for settle in self._settles:
            settle(now_s)
        self.num_reads += reads
        self._has_changed = True

    def take_changed(self) -> bool:
        """Return whether the rate has changed since the last call: then the ends of all reads are other ones."""
        changed, self._has_changed = self._has_changed, False
        return changed
