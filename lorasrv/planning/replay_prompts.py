"""Prompts of a replay: as long as the recorded ones, and alike where those were. No torch.

A trace tells how many tokens of a prompt were known, not which. Here the requests of one adapter begin with the same
tokens, as many as were known; the first of each adapter begins with as many as any other shares, for it is where they
come from. All other tokens are a request's own. Whether a beginning is still there is then up to the real prefix cache.
"""

from collections.abc import Sequence

from lorasrv.trace import TraceRequest

EOS, OTHER_TOKEN, SHARED_TOKEN = 0, 1, 2
FIRST_OWN_TOKEN = 3
VOCABULARY = 1 << 62


class Prompts:
    """Token ids by the number of a request in the trace."""

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
        """The tokens of one. A page's hash tells its request from the first own token on, whatever follows."""
        length = self._trace[number].prompt_tokens
        shared = min(self._shared[number], length)
        if shared == length:
            return (SHARED_TOKEN,) * length
        return (SHARED_TOKEN,) * shared + (FIRST_OWN_TOKEN + number,) + (OTHER_TOKEN,) * (length - shared - 1)
