"""Snapshot keeper: passes snapshot orders to the loader and its reports back, and answers calls about snapshots."""

from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.storage.snapshots import SnapshotName
from lorasrv.engine.messages import FindSnapshot, MakeSnapshot, SnapshotStatus
from lorasrv.errors import SnapshotFailure
from lorasrv.memory.snapshots import SnapshotManager
from lorasrv.scheduler_output import NO_SNAPSHOTS, SnapshotOrders
from lorasrv.worker.snapshot_loader import (
    SnapshotCopied,
    SnapshotFailed,
    SnapshotLoaded,
    SnapshotLoader,
    SnapshotRemoved,
    SnapshotSaved,
)

_WHY_NOT = "no snapshot is kept: they are off, or the prompt is too short, or larger than --snapshot-bytes"


@dataclass(frozen=True, slots=True)
class _Call:
    name: SnapshotName
    tokens: int


class SnapshotKeeper:
    """Connect manager and loader. For the engine's thread.

    Args:
        loader: None if no snapshot is kept.
        complete: called with a call's number and its result.
    """

    def __init__(
        self, manager: SnapshotManager, loader: SnapshotLoader | None, complete: Callable[[int, object], None]
    ) -> None:
        self._manager, self._loader = manager, loader
        self._complete = complete
        self._calls: dict[int, _Call] = {}

    def call(self, number: int, request: MakeSnapshot | FindSnapshot) -> None:
        """Answer a call, at once or when the snapshot is on the disk."""
        found = self._manager.find(request.adapter, request.prefix, request.token_ids)
        if isinstance(request, FindSnapshot) or found is not None:
            self._complete(number, None if found is None else SnapshotStatus(*found))
            return
        wanted = self._manager.want(request.adapter, request.prefix, request.token_ids)
        if wanted is None:
            self._complete(number, SnapshotFailure(_WHY_NOT))
        else:
            self._calls[number] = _Call(*wanted)

    def cancel(self, number: int) -> None:
        """Drop a call whose caller does not wait any more."""
        self._calls.pop(number, None)

    def send(self, orders: SnapshotOrders) -> None:
        """Begin the snapshots that a step orders, before the step computes."""
        if self._loader is not None and orders != NO_SNAPSHOTS:
            self._loader.send(orders)

    def take_reports(self) -> None:
        """Tell the manager what has been done."""
        for report in self._loader.poll() if self._loader is not None else ():
            match report:
                case SnapshotLoaded():
                    self._manager.on_loaded(report.name, report.seconds, report.num_pages)
                case SnapshotCopied():
                    self._manager.on_copied(report.name, report.seconds)
                case SnapshotSaved():
                    self._manager.on_saved(report.name, report.nbytes, report.removed)
                    self._answer(report.name, report.nbytes)
                case SnapshotRemoved():
                    self._manager.on_removed(report.name)
                case SnapshotFailed(is_save=True):
                    self._manager.on_save_failed(report.name, report.reason)
                    self._answer(report.name, SnapshotFailure(f"the snapshot was not kept: {report.error}"))
                case SnapshotFailed():
                    self._manager.on_load_failed(report.name, report.reason, is_gone=report.is_gone)
        for name in {call.name for call in self._calls.values()}:
            if not self._manager.is_coming(name):
                self._answer(
                    name, SnapshotFailure("too many snapshots wait for their prompts to be computed; try again")
                )

    def close(self) -> None:
        """Stop the loader."""
        if self._loader is not None:
            self._loader.close()

    def _answer(self, name: SnapshotName, result: int | SnapshotFailure) -> None:
        for number, call in list(self._calls.items()):
            if call.name == name:
                del self._calls[number]
                self._complete(number, SnapshotStatus(call.tokens, result) if isinstance(result, int) else result)
