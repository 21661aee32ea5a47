"""The loader's threads: reports for what is wanted, none for what was cancelled, and every pin given back."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from disk_time import DiskTime
from server import eventually

from adapter_store.errors import AdapterCorrupt, LoadCancelled
from adapter_store.spec import AdapterKey
from lorasrv.config import PARALLEL_LOADS
from lorasrv.worker.adapter_loader import Done, InlineLoader, Loader, LoaderReport, ThreadedLoader

KEYS = [AdapterKey(f"{i:064x}") for i in range(PARALLEL_LOADS + 3)]


class Source:
    """Loads that last until they are let go, and counted pins."""

    def __init__(self) -> None:
        self.gates: dict[AdapterKey, threading.Event] = {}
        self.hangs: dict[AdapterKey, threading.Event] = {}
        self.errors: dict[AdapterKey, Exception] = {}
        self.pins: Counter[AdapterKey] = Counter()
        self.begun: list[AdapterKey] = []
        self.on_host: set[AdapterKey] = set()

    def fetch_pinned(self, key: AdapterKey, should_stop: Callable[[], bool]) -> tuple[Any, bool]:
        self.begun.append(key)
        if key in self.hangs:
            self.hangs[key].wait(30)
        while key in self.gates and not self.gates[key].wait(0.002):
            if should_stop():
                raise LoadCancelled("stopped")
        if key in self.errors:
            raise self.errors[key]
        self.pins[key] += 1
        from_disk = key not in self.on_host
        self.on_host.add(key)
        return SimpleNamespace(nbytes=7), from_disk

    def pinned(self, key: AdapterKey) -> Any:
        assert self.pins[key] > 0
        return SimpleNamespace(nbytes=7)

    def is_on_host(self, key: AdapterKey) -> bool:
        return key in self.on_host

    def unpin(self, key: AdapterKey) -> None:
        assert self.pins[key] > 0
        self.pins[key] -= 1


def _poll(loader: Loader, count: int) -> list[LoaderReport]:
    reports: list[LoaderReport] = []

    def polled() -> bool:
        reports.extend(loader.poll())
        return len(reports) >= count

    eventually(polled)
    assert len(reports) == count
    return reports


@pytest.fixture
def source() -> Source:
    return Source()


def _loader(kind: str, source: Source, write: Any = lambda *_: None) -> Loader:
    if kind == "inline":
        return InlineLoader(cast(Any, source), write)
    return ThreadedLoader(cast(Any, source), write, lambda: None)


@pytest.fixture
def threaded(source: Source) -> Any:
    loader = _loader("threaded", source)
    yield loader
    for gate in source.gates.values():
        gate.set()
    loader.close()
    assert not +source.pins, "a pin is left"


both_kinds = pytest.mark.parametrize("kind", ["inline", "threaded"])


@both_kinds
def test_load_then_copy_and_the_pin_in_between(source: Source, kind: str) -> None:
    written: list[Any] = []
    loader = _loader(kind, source, lambda packed, placed: written.append(placed))
    loader.load(KEYS[0])
    (report,) = _poll(loader, 1)
    assert (report.key, report.done, report.nbytes, report.from_disk) == (KEYS[0], Done.LOADED, 7, True)
    assert source.pins[KEYS[0]] == 1
    loader.copy(KEYS[0], cast(Any, "place"))
    (report,) = _poll(loader, 1)
    assert (report.done, written) == (Done.COPIED, ["place"])
    assert not source.pins[KEYS[0]]
    loader.load(KEYS[0])
    loader.close()
    assert not source.pins[KEYS[0]]


@both_kinds
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AdapterCorrupt("damaged; upload again"), "damaged; upload again"),
        (OSError(5, "I/O error", "/secret/path"), "reading the adapter failed: I/O error"),
        (ValueError("/secret/path"), "the server's log says why"),
        (MemoryError("/secret/path"), "too little memory left to load the adapter; try again later"),
    ],
)
def test_failures_are_reports_without_paths(source: Source, kind: str, error: Exception, words: str) -> None:
    loader = _loader(kind, source)
    source.errors[KEYS[0]] = error
    loader.load(KEYS[0])
    (report,) = _poll(loader, 1)
    assert report.done is Done.FAILED
    assert words in report.error
    assert "secret" not in report.error
    source.errors.clear()
    loader.load(KEYS[0])
    assert _poll(loader, 1)[0].done is Done.LOADED
    loader.close()


def test_a_failing_copy_is_a_report_too(source: Source) -> None:
    loader = _loader("inline", source, Mock(side_effect=RuntimeError("out of memory")))
    loader.load(KEYS[0])
    loader.poll()
    loader.copy(KEYS[0], cast(Any, None))
    (report,) = loader.poll()
    assert report.done is Done.FAILED
    assert not source.pins[KEYS[0]]


def test_slow_loads_hold_up_neither_other_loads_nor_copies(threaded: ThreadedLoader, source: Source) -> None:
    slow = KEYS[: PARALLEL_LOADS - 1]
    source.gates = {key: threading.Event() for key in slow}
    for key in slow:
        threaded.load(key)
    for key in KEYS[PARALLEL_LOADS:]:
        threaded.load(key)
        assert _poll(threaded, 1)[0].key == key
        threaded.copy(key, cast(Any, None))
        assert _poll(threaded, 1)[0].done is Done.COPIED


@pytest.mark.parametrize("when", ["queued", "reading", "loaded"])
def test_a_cancelled_load_is_not_reported_and_keeps_no_pin(threaded: ThreadedLoader, source: Source, when: str) -> None:
    blockers = KEYS[1 : 1 + PARALLEL_LOADS] if when == "queued" else []
    source.gates = {key: threading.Event() for key in [*blockers, *([KEYS[0]] if when == "reading" else [])]}
    for key in blockers:
        threaded.load(key)
    threaded.load(KEYS[0])
    if when == "loaded":
        _poll(threaded, 1)
    elif when == "reading":
        while KEYS[0] not in source.begun:
            time.sleep(0.002)
    threaded.cancel(KEYS[0])
    source.gates.pop(KEYS[0], None)
    threaded.load(KEYS[0])
    for key in blockers:
        source.gates[key].set()
    reports = _poll(threaded, len(blockers) + 1)
    assert sum(report.key == KEYS[0] for report in reports) == 1
    time.sleep(0.02)
    assert threaded.poll() == []
    for key in (KEYS[0], *blockers):
        threaded.cancel(key)


def test_what_was_prefetched_is_read_once_and_reported_only_if_ordered(
    threaded: ThreadedLoader, source: Source
) -> None:
    source.gates = {KEYS[0]: threading.Event(), KEYS[1]: threading.Event()}
    for key in KEYS[:2]:
        threaded.prefetch(key)
        threaded.prefetch(key)
    threaded.load(KEYS[0])
    for gate in source.gates.values():
        gate.set()
    (report,) = _poll(threaded, 1)
    assert report.key == KEYS[0]
    assert sorted(source.begun) == KEYS[:2]
    eventually(lambda: KEYS[1] not in threaded._loads)
    assert source.pins[KEYS[1]] == 0
    assert threaded.poll() == []
    threaded.load(KEYS[1])
    (report,) = _poll(threaded, 1)
    assert (report.key, report.from_disk) == (KEYS[1], True), "it came from disk, if ahead of its order"
    threaded.cancel(KEYS[1])
    threaded.load(KEYS[1])
    assert not _poll(threaded, 1)[0].from_disk
    for key in KEYS[:2]:
        threaded.cancel(key)


def test_prefetching_is_bounded(threaded: ThreadedLoader, source: Source) -> None:
    source.gates = {key: threading.Event() for key in KEYS}
    for key in KEYS:
        threaded.prefetch(key)
    assert len(threaded._loads) == PARALLEL_LOADS


def test_a_load_that_hangs_fails_and_keeps_no_pin_when_it_returns(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = DiskTime(monkeypatch)
    loader = ThreadedLoader(cast(Any, source), lambda *_: None, lambda: None, load_timeout_s=60.0)
    source.hangs = {KEYS[0]: threading.Event()}
    loader.load(KEYS[0])
    eventually(lambda: source.begun)
    clock.let_pass(loader._load_threads, 60.0)
    (report,) = _poll(loader, 1)
    assert (report.done, report.reason) == (Done.FAILED, "adapter_load_timeout")
    assert "within 60 s (--load-timeout-s)" in report.error
    loader.load(KEYS[0])
    assert "has not returned" in _poll(loader, 1)[0].error
    assert loader.read_stats().num_hung == 1
    source.hangs[KEYS[0]].set()
    eventually(lambda: loader.read_stats().num_hung == 0)
    eventually(lambda: not +source.pins)
    loader.load(KEYS[0])
    assert _poll(loader, 1)[0].done is Done.LOADED
    loader.close()
    assert not +source.pins


def test_closing_unpins_what_is_loaded_and_what_waits_to_be_copied(source: Source) -> None:
    gate = threading.Event()
    loader, inline = _loader("threaded", source, lambda *_: gate.wait(30)), _loader("inline", source)
    for key in KEYS[:3]:
        loader.load(key)
    inline.load(KEYS[3])
    _poll(loader, 3)
    _poll(inline, 1)
    loader.copy(KEYS[0], cast(Any, None))
    loader.copy(KEYS[1], cast(Any, None))
    assert sum(source.pins.values()) == 4
    threading.Timer(0.05, gate.set).start()
    loader.close()
    inline.close()
    assert not +source.pins


def test_after_the_end_nothing_is_begun(source: Source) -> None:
    loader = _loader("threaded", source)
    loader.close()
    loader.prefetch(KEYS[0])
    assert source.begun == []
