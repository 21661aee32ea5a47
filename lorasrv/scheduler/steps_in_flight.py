"""Steps in flight: the tokens that submitted steps compute, and the requests that have finished meanwhile."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lorasrv.outputs import RequestId
from lorasrv.request import Request

FlightTokens = tuple[Request, int, int]
"""(request, number of its tokens in flight in a step, number of pending tokens after them)."""


class StepsInFlight:
    """Count the tokens in flight and pending of each request. Mutated by the scheduler only.

    Args:
        free: gives back the pages of a finished request.
    """

    def __init__(self, free: Callable[[Request], None]) -> None:
        self._free = free
        # By step number.
        self._steps: dict[int, Sequence[FlightTokens]] = {}
        self._finished: dict[RequestId, Request] = {}

    @property
    def finished(self) -> Iterable[Request]:
        """Return the requests that have finished and still hold their pages."""
        return self._finished.values()

    def add(self, number: int, tokens: Sequence[FlightTokens]) -> None:
        """Note that a step is in flight."""
        self._steps[number] = tokens
        for request, count, pending in tokens:
            request.num_in_flight_tokens += count
            request.num_pending_tokens += pending

    def keep(self, request: Request) -> None:
        """Note that a request has finished while a step reads and writes its pages."""
        self._finished[request.request_id] = request

    def remove(self, number: int) -> None:
        """Note that a step is not in flight any more; requests that have finished meanwhile give back their pages."""
        for entry in self._steps.pop(number, ()):
            self._take_back(*entry)

    def leave_out(self, number: int, request: Request) -> None:
        """Note that a step is computed without one of its requests."""
        entries = self._steps.get(number, ())
        self._steps[number] = [entry for entry in entries if entry[0] is not request]
        for entry in entries:
            if entry[0] is request:
                self._take_back(*entry)

    def _take_back(self, request: Request, count: int, pending: int) -> None:
        request.num_in_flight_tokens -= count
        request.num_pending_tokens -= pending
        if not request.num_in_flight_tokens and self._finished.pop(request.request_id, None) is not None:
            self._free(request)

    def clear(self) -> None:
        """Note that no step is in flight any more."""
        for number in tuple(self._steps):
            self.remove(number)

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Compare the counts of requests that hold pages with the steps.

        Raises:
            AssertionError: they differ.
        """
        in_flight, pending = Counter[RequestId](), Counter[RequestId]()
        for request, count, num_pending in (entry for entries in self._steps.values() for entry in entries):
            in_flight[request.request_id] += count
            pending[request.request_id] += num_pending
        of = list(holders)
        held = Counter({r.request_id: r.num_in_flight_tokens for r in of})
        assert in_flight == +held, "tokens in flight differ from the steps in flight"
        held = Counter({r.request_id: r.num_pending_tokens for r in of})
        assert +pending == +held, "pending tokens differ from the steps in flight"
