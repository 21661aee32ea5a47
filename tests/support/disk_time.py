"""The time of reads of a disk, which passes only when a test lets it."""

from types import SimpleNamespace

import pytest
from clock import Clock

from lorasrv.worker import disk_threads
from lorasrv.worker.disk_threads import DiskThreads


class DiskTime:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._clock = Clock()
        patch.setattr(disk_threads, "time", SimpleNamespace(monotonic=self._clock))

    def let_pass(self, threads: DiskThreads, seconds: float) -> None:
        """Let the reads under way be so much older."""
        with threads._lock:
            self._clock.now += seconds
            threads._has_ended.notify_all()
