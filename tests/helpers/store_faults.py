"""A scenario with one call refused by the disk: the store says so in its own words, stays whole and goes on."""

import contextlib
import errno
import gc
import os
from pathlib import Path

from disk_watch import DiskWatch
from forgetful_disk import KILLED, SAFE_ONLY, write_tree
from store_runs import fast_fsync
from store_scenarios import SCENARIOS, Hand, Outcome, Step, observe

from adapter_store.errors import AdapterError, AdapterNotFound, StoreFull, StoreUnusable


class FaultRun:
    """One scenario in the folder `top`, whose call number `turn` fails with `number`, an errno.

    Attributes:
        kind: of the call that failed; empty if there were not so many calls.
    """

    def __init__(self, name: str, outcome: Outcome, top: Path, turn: int, number: int) -> None:
        self.kind = ""
        self._litter = False
        self._scenario, self._outcome, self._top = SCENARIOS[name], outcome, top
        self._turn, self._number = turn, number
        self._watch = DiskWatch(top, self._fail)
        self._hand = Hand(top)

    def _fail(self, now: int, kind: str) -> None:
        if now == self._turn:
            self.kind = kind
            raise OSError(self._number, os.strerror(self._number), self._top)

    def run(self) -> None:
        """Raises: AssertionError: the store did not bear it."""
        descriptors = _open_descriptors()
        with self._watch.active():
            if self._try(self._scenario.open) is not None:
                self._hand.open()
            for done, step in enumerate(self._scenario.steps):
                self._step(step, done)
                self._watch.acknowledge()
            self._try(Hand.close)
        assert self._watch.failures == []
        if not _open_descriptors() <= descriptors:
            gc.collect()  # takes long: an error may hold on to frames with files
            assert _open_descriptors() <= descriptors, "a file stays open"
        with fast_fsync():
            self._outcome.check(self._top, len(self._scenario.steps), litter=self._litter)

    def _step(self, step: Step, done: int) -> None:
        before, failed = self.kind, self._try(step)
        with self._watch.paused():
            # Removing what nothing names is not worth a failure; it is tried again when it is old.
            self._litter |= self.kind != before and failed is None
            if failed is not None:
                self._look(failed, done)
                # It changed everything or nothing; whoever was refused tries again.
                with contextlib.suppress(AdapterNotFound):
                    step(self._hand)
            assert observe(self._hand.store) == self._outcome.states[done + 1], f"once more after {failed!r}"
            unfinished = list((self._hand.root / "tmp").iterdir())
            assert not unfinished or self.kind == "unlink", "an upload that failed left its file"

    def _look(self, failed: AdapterError, done: int) -> None:
        """The store right after the refusal, and what a crash would leave now: what was refused may come to be, as a
        whole; it may not come back as a half.
        """
        if self._hand.opened is not None:
            state = observe(self._hand.store)
            assert state in self._outcome.states[done : done + 2], f"after {failed!r}: {state}"
            # Whoever opens a store is told which one; clients are not.
            assert str(self._top) not in str(failed)
        for n, loss in enumerate((KILLED, SAFE_ONLY)):
            top = self._top.parent / f"{self._top.name}-after-{n}"
            top.mkdir()
            write_tree(self._watch.disk.tree(loss), top)
            with fast_fsync():
                self._outcome.check(top, done, litter=True)

    def _try(self, step: Step) -> AdapterError | None:
        try:
            step(self._hand)
        except (StoreFull, StoreUnusable) as error:
            failed = error.with_traceback(None)
        else:
            return None
        # SQLite has no word for a full disk but where it writes.
        if self._number == errno.EIO or not self.kind.startswith("sqlite"):
            assert isinstance(failed, StoreFull if self._number == errno.ENOSPC else StoreUnusable), failed
        return failed


def _open_descriptors() -> set[str]:
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(name) for name in names if os.path.lexists(name)}
