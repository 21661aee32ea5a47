"""The requests of a replay: prompts, layouts of adapters, and the result of each request. Torch-free.

Prompts have the recorded lengths and share tokens if the recorded ones did. A trace contains how many tokens of a
prompt were cached, but not which. Here the requests of one adapter begin with the same tokens, as many as were cached.
The first request of each adapter begins with as many of these as any other shares, because it is their origin. All
other tokens are a request's own. The real prefix cache decides whether a shared beginning is still cached.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.metrics.trace import TraceRequest
from lorasrv.outputs import RequestTiming
from lorasrv.placement.placement import CHARS_PER_TOKEN, SESSION_CHARS
from sgmv_kernels.formats.adapter_panels import AdapterLayout

OTHER_TOKEN, SHARED_TOKEN = 1, 2
FIRST_OWN_TOKEN = 4


class SimulatedPrompts:
    """Generate token ids by a request's number in the trace."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._trace = trace
        self._shared = [request.cached_tokens for request in trace]
        most: dict[str | None, int] = {}
        first: dict[str | None, int] = {}
        for number, request in enumerate(trace):
            most[request.adapter] = max(most.get(request.adapter, 0), request.cached_tokens)
            first.setdefault(request.adapter, number)
        for adapter, number in first.items():
            self._shared[number] = most[adapter]

    def of(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a request. A page's hash identifies its request from the first own token on."""
        length = self._trace[number].prompt_tokens
        shared = min(self._shared[number], length)
        if shared == length:
            return (SHARED_TOKEN,) * length
        return (SHARED_TOKEN,) * shared + (FIRST_OWN_TOKEN + number,) + (OTHER_TOKEN,) * (length - shared - 1)

    def session(self, number: int) -> str:
        """Return the conversation to which an edge would assign a request: the beginning of its prompt."""
        return repr(self.of(number)[: SESSION_CHARS // CHARS_PER_TOKEN])


class SimTraffic:
    """Hold the requests of a replay, in order of arrival.

    Args:
        layout_of: adapter name -> its layout in the pool.
    """

    def __init__(self, trace: Sequence[TraceRequest], layout_of: Callable[[str], AdapterLayout]) -> None:
        self.requests = sorted(trace, key=lambda request: request.arrival_s)
        self.names = {key_of(r.adapter): r.adapter for r in self.requests if r.adapter is not None}
        self.layouts = {key: layout_of(name) for key, name in self.names.items()}
        self.typical_bytes = sum(layout.nbytes for layout in self.layouts.values()) // max(1, len(self.layouts))
        self.prompts = SimulatedPrompts(self.requests)
        self.has_drafts = any(request.accepted_tokens for request in trace)

    def outcomes(self) -> "list[SimulatedRequest]":
        """Return a record for each request, to be filled by a replay."""
        return [SimulatedRequest(request, number) for number, request in enumerate(self.requests)]


@dataclass(slots=True)
class SimulatedRequest:
    """Record the result of a request; times are on the trace's clock."""

    request: TraceRequest
    # Its place in the order of arrivals.
    number: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float | None = None
    tokens: int = 0
    timing: RequestTiming = field(default_factory=RequestTiming)
    # Why the request was not served; None: it was.
    refused: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per token after the first."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True)
class SimulationResult:
    """Hold the counts of a replay."""

    outcomes: Sequence[SimulatedRequest]
    # Gaps between the tokens of each answer, for all answers.
    gaps_s: Sequence[float]
    end_s: float
    busy_s: float
    steps: int
    preemptions: int
    loads_from_disk: int
    loads_from_host: int
    evictions: int
    pool_used: float
    """Mean share of the pool held by requests and adapters while steps were computed."""


def key_of(adapter: str) -> AdapterKey:
    """Return a key in place of the adapter's content: in a trace, a name has only one content."""
    return AdapterKey(hashlib.sha256(adapter.encode("utf-8", "surrogatepass")).hexdigest())
