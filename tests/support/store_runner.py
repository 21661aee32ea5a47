"""The crash runner: run a scenario undisturbed, then simulate a power loss, an error or a kill at every call.

    python store_runner.py FOLDER [EVERY]

As a program it kills real processes: for every scenario and every k (or each EVERY-th), it forks a child (the program
has no threads, so forking is safe) that ends without clean-up before its k-th call. It prints the number of kills.
"""

import contextlib
import copy
import errno
import gc
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from store_disk import KILLED, SAFE_ONLY, DiskWatch, ForgetfulDisk, Loss, Op, crash_states, read_tree, write_tree
from store_scenarios import SCENARIOS, Hand, Outcome, Step, observe, prepare

from adapter_store.errors import AdapterError, AdapterNotFound, StoreFull, StoreUnusable

MAX_CALLS = 10_000
EXIT_KILLED = 99


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder in memory, if possible: in these tests, SQLite waits for its disk thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextlib.contextmanager
def fast_fsync() -> Iterator[None]:
    """Do not wait for the disk in runs without a power loss."""
    with mock.patch("os.fsync"):
        yield


@dataclass
class Run:
    """Hold an undisturbed run: the disk before it, every change, and what was visible after each step."""

    name: str
    before: ForgetfulDisk
    ops: list[Op]
    outcome: Outcome
    _passed: set[int] = field(default_factory=set)

    def sites(self) -> set[str]:
        """Return the callers of fsync."""
        return {op.site for op in self.ops if op.kind == "sync"}

    def unplug(
        self, folder: Path, losses: Iterable[Loss], dropped_sites: frozenset[str] = frozenset()
    ) -> tuple[int, str | None]:
        """Crash after each change; return the number of different disks that were checked, and the first failure."""
        checked = 0
        for done, tree in crash_states(copy.deepcopy(self.before), self.ops, losses, dropped_sites):
            state = hash((done, frozenset(tree.items())))
            if state in self._passed:
                continue
            checked += 1
            top = folder / f"crash-{checked}"
            write_tree(tree, top)
            try:
                with fast_fsync():
                    self.outcome.check(top, done)
            except (AssertionError, AdapterError) as error:
                return checked, f"{self.name}: {type(error).__name__}: {error}"
            finally:
                shutil.rmtree(top)
            self._passed.add(state)
        return checked, None


def run(name: str, top: Path) -> Run:
    """Run a scenario undisturbed."""
    scenario, outcome = SCENARIOS[name], Outcome()
    prepare(scenario, top)
    before, watch, hand = ForgetfulDisk(top), DiskWatch(top), Hand(top)
    with watch.active():
        scenario.open(hand)
        outcome.note(hand)
        for step in scenario.steps:
            step(hand)
            watch.note("ack")
            outcome.note(hand)
        hand.close()
    assert watch.failures == []
    assert watch.disk.tree(KILLED) == read_tree(top), "something changed the disk unseen"
    return Run(name, before, watch.ops, outcome)


class FaultRun:
    """Run a scenario in the folder `top` whose call number `turn` fails with an errno.

    The store must report it with its own error, stay intact and continue to work. `kind` is that of the failed call,
    empty if there were fewer calls.
    """

    def __init__(self, name: str, outcome: Outcome, top: Path, turn: int, number: int) -> None:
        self.kind = ""
        self._litter = False
        self._scenario, self._outcome, self._top = SCENARIOS[name], outcome, top
        self._turn, self._number = turn, number
        self._watch, self._hand = DiskWatch(top, self._fail), Hand(top)

    def _fail(self, now: int, kind: str) -> None:
        if now == self._turn:
            self.kind = kind
            raise OSError(self._number, os.strerror(self._number), self._top)

    def run(self) -> None:
        """Raise AssertionError if the store did not survive it."""
        descriptors = _open_descriptors()
        with self._watch.active():
            if self._try(self._scenario.open) is not None:
                self._hand.open()
            for done, step in enumerate(self._scenario.steps):
                self._step(step, done)
                self._watch.note("ack")
            self._try(Hand.close)
        assert self._watch.failures == []
        if not _open_descriptors() <= descriptors:
            gc.collect()  # slow: an error may keep frames with files alive
            assert _open_descriptors() <= descriptors, "a file stays open"
        with fast_fsync():
            self._outcome.check(self._top, len(self._scenario.steps), litter=self._litter)

    def _step(self, step: Step, done: int) -> None:
        before, failed = self.kind, self._try(step)
        with self._watch.paused():
            # A failure to remove unreferenced files is not reported; the removal is retried when they are old.
            self._litter |= self.kind != before and failed is None
            if failed is not None:
                self._check_refusal(failed, done)
                # The step changed everything or nothing; the client tries again.
                with contextlib.suppress(AdapterNotFound):
                    step(self._hand)
            assert observe(self._hand.store) == self._outcome.states[done + 1], f"once more after {failed!r}"
            unfinished = list((self._hand.root / "tmp").iterdir())
            assert not unfinished or self.kind == "unlink", "an upload that failed left its file"

    def _check_refusal(self, failed: AdapterError, done: int) -> None:
        """Check the store after the refusal, and after a crash now: it must have all or nothing of the step."""
        if self._hand.opened is not None:
            state = observe(self._hand.store)
            assert state in self._outcome.states[done : done + 2], f"after {failed!r}: {state}"
            # Only the operator who opens a store may see the path.
            assert str(self._top) not in str(failed)
        for n, loss in enumerate((KILLED, SAFE_ONLY)):
            top = self._top.parent / f"{self._top.name}-after-{n}"
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
        # SQLite reports a full disk as such only when it writes.
        if self._number == errno.EIO or not self.kind.startswith("sqlite"):
            assert isinstance(failed, StoreFull if self._number == errno.ENOSPC else StoreUnusable), failed
        return failed


def refuse_each(name: str, folder: Path, every: int, numbers: tuple[int, ...]) -> int:
    """Let every `every`-th call of a scenario fail, with each errno in turn; return the number of failed calls."""
    outcome, template = run(name, folder / "run").outcome, folder / "template"
    prepare(SCENARIOS[name], template)
    failed = 0
    for turn in range(0, MAX_CALLS, every):
        kind = ""
        for number in numbers:
            top = folder / f"{turn}-{number}"
            shutil.copytree(template, top)
            fault = FaultRun(name, outcome, top, turn, number)
            try:
                fault.run()
            except (AssertionError, AdapterError) as error:
                where = f"{name}, call {turn} ({fault.kind}), {errno.errorcode[number]}"
                raise AssertionError(f"{where}: {error}") from error
            for path in folder.glob(f"{top.name}*"):
                shutil.rmtree(path)
            failed += fault.kind != ""
            kind = fault.kind
        if not kind:
            break
    return failed


def _open_descriptors() -> set[str]:
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {os.readlink(name) for name in names if os.path.lexists(name)}


def _child(name: str, top: Path, k: int, acknowledged: int) -> None:
    """Run the scenario, and end before call k; write a byte to the descriptor `acknowledged` after each step."""
    hand = Hand(top)
    with DiskWatch(top, lambda now, kind: os._exit(EXIT_KILLED) if now == k else None).active():
        SCENARIOS[name].open(hand)
        for step in SCENARIOS[name].steps:
            step(hand)
            os.write(acknowledged, b".")
        hand.close()
    os._exit(0)


def _kill(name: str, outcome: Outcome, template: Path, top: Path, k: int) -> tuple[int, bool]:
    """Kill one child before call k; return the number of steps that the store shows, and whether call k was reached."""
    shutil.copytree(template, top)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _child(name, top, k, write)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        done = len(pipe.read())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, EXIT_KILLED), f"{name}, call {k}: exit code {code}"
    with fast_fsync():
        shown = outcome.check(top, done)
    shutil.rmtree(top)
    return shown, code == EXIT_KILLED


def main(folder: Path, every: int) -> None:
    kills = 0
    for n, name in enumerate(SCENARIOS):
        outcome, template = run(name, folder / f"{n}-run").outcome, folder / f"{n}-template"
        prepare(SCENARIOS[name], template)
        last = 0
        for k in range(n % every, MAX_CALLS, every):
            steps, killed = _kill(name, outcome, template, folder / f"{n}-{k}", k)
            assert steps >= last, f"{name}: a later kill showed an earlier state"
            last = steps
            if not killed:
                break
            kills += 1
        assert last == len(SCENARIOS[name].steps)
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
