"""What is known of a request when it is over, and who wants to hear of it. No torch, no text of it."""

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.request import AdapterTier, FinishReason


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One choice of one prompt, from its arrival (`arrived_s`, monotonic) to its end `total_s` later.

    `why` names what went wrong, `adapter_cold` for instance; for `abort` who ended it, `client` or the error's name; ""
    if nothing did. `first_token_s` after arrival; None: there was none. `queue_s` and `load_s` are parts of that.
    `is_further` choices share the pages of the first one's prompt. `fell_back`: the base answered.
    """

    request_id: str
    adapter_id: str
    adapter_key: AdapterKey | None
    principal: str
    reason: FinishReason
    why: str
    arrived_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_s: float = 0.0
    load_s: float = 0.0
    first_token_s: float | None = None
    tier: AdapterTier | None = None
    fell_back: bool = False
    is_further: bool = False

    @property
    def prefill_s(self) -> float:
        """From its first step to its first token; 0 if there was none."""
        return max(0.0, self.first_token_s - self.queue_s - self.load_s) if self.first_token_s is not None else 0.0

    @property
    def decode_s(self) -> float:
        """From its first token to its end; 0 if there was none."""
        return self.total_s - self.first_token_s if self.first_token_s is not None else 0.0


Listener = Callable[[EndedRequest], None]
REQUEST_LISTENER: ContextVar[Listener | None] = ContextVar("request_listener", default=None)
"""Whoever sets it hears of the end of each request that is added in its context."""


def name_of(kind: type[BaseException]) -> str:
    """An exception's class as labels spell it: `adapter_cold`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
