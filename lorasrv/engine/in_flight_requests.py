"""In-flight requests: which requests use an adapter, until their last choice has finished, so that it can be deleted.

The engine knows only contents. Here a request is also known by its adapter id, as several ids may name one content.
Belongs to the event loop's thread.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lorasrv.errors import AdapterDeleted
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.outputs import RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest


@dataclass(slots=True, eq=False)
class InFlightUse:
    """Hold one request's use of adapters."""

    # (id, version) of each adapter.
    versions: frozenset[tuple[str, int]]
    # Choices that have not finished.
    open: set[RequestId]
    is_accepted: bool = False
    # Whether any choice has an output.
    has_output: bool = False
    # Why the request was aborted before it was accepted.
    ended_by: Exception | None = None

    def check(self) -> None:
        """Raise if the request was aborted before it was accepted.

        Raises:
            AdapterDeleted: its adapter was deleted by force.
        """
        if self.ended_by is not None:
            raise self.ended_by


class InFlightRequests(RequestObserver):
    """Track every request that has not finished.

    Args:
        abort: aborts one choice before the next step and tells its reader why; ignores unknown ids.
    """

    def __init__(self, abort: Callable[[RequestId, Exception], object]) -> None:
        self._abort = abort
        self._uses: dict[RequestId, InFlightUse] = {}
        # Adapter of each accepted choice, and the number of beams that must run together.
        self._live: dict[RequestId, tuple[str, int]] = {}
        self._by_adapter: dict[str, Counter[int]] = {}
        self._has_ended = asyncio.Event()

    @contextmanager
    def arriving(
        self, versions: Collection[tuple[str, int]], request_ids: Collection[RequestId]
    ) -> Iterator[InFlightUse]:
        """Count a request while it is being accepted; after the block it counts only if it was accepted."""
        use = InFlightUse(frozenset(versions), set(request_ids))
        self._uses.update(dict.fromkeys(request_ids, use))
        try:
            yield use
        finally:
            if not use.is_accepted:
                for request_id in request_ids:
                    self.on_finished(request_id)

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        for request in requests:
            self._uses[request.request_id].is_accepted = True
            together = 1 if request.beams is None else request.beams.width
            self._live[request.request_id] = request.adapter_id, together
            self._by_adapter.setdefault(request.adapter_id, Counter())[together] += 1

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        if (use := self._uses.get(request_id)) is not None:
            use.has_output = True

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        use = self._uses.pop(request_id, None)
        if use is None:
            return
        if (live := self._live.pop(request_id, None)) is not None:
            adapter_id, together = live
            counts = self._by_adapter[adapter_id]
            counts[together] -= 1
            if not counts[together]:
                del counts[together]
            if not counts:
                del self._by_adapter[adapter_id]
        use.open.discard(request_id)
        if not use.open:
            has_ended, self._has_ended = self._has_ended, asyncio.Event()
            has_ended.set()

    @property
    def by_adapter(self) -> Mapping[str, Mapping[int, int]]:
        """Return how many accepted choices of each adapter have not finished, by the number of beams that must run
        together (1: no beam search); adapters without any are left out."""
        return self._by_adapter

    async def until_unused(self, adapter_id: str, versions: Collection[int], timeout_s: float) -> int:
        """Wait until no request uses one of these versions, at most `timeout_s`.

        Returns:
            The number of requests that still do.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._of(adapter_id, versions):
                    await self._has_ended.wait()
        except TimeoutError:
            pass
        return len(self._of(adapter_id, versions))

    def abort_adapter(self, adapter_id: str, versions: Collection[int]) -> int:
        """Abort the requests on these versions before the next step, with AdapterDeleted for their readers; return how
        many."""
        error = AdapterDeleted(f"adapter {adapter_id!r} was deleted, and this request ended with it")
        return self._end(self._of(adapter_id, versions), error)

    def abort_unanswered(self, adapter_id: str, error: Exception) -> int:
        """Abort the accepted requests on an adapter that have no output yet, with an error for their readers; return
        how many."""
        live = {self._uses[request_id] for request_id, (name, _) in self._live.items() if name == adapter_id}
        return self._end({use for use in live if not use.has_output}, error)

    def _end(self, doomed: Collection[InFlightUse], error: Exception) -> int:
        for use in doomed:
            use.ended_by = error
            for request_id in list(use.open):
                self._abort(request_id, error)
                # Ended for its reader: nobody has to wait until the engine has ended it, too.
                self.on_finished(request_id)
        return len(doomed)

    def _of(self, adapter_id: str, versions: Collection[int]) -> set[InFlightUse]:
        doomed = {(adapter_id, version) for version in versions}
        return {use for use in self._uses.values() if not doomed.isdisjoint(use.versions)}
