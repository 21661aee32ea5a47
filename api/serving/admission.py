"""Admit requests: check the engine's queue and the limits of the caller's key.

Both are checked twice, in the same order and with the same errors: before any work is done for a request, so that a
flood costs little, and again when its size is known. The engine's observers count each refusal once.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from api.auth.principal import Caller
from api.auth.rate_limits import RateLimiter
from api.errors import cause_of
from lorasrv.outputs import OutputStream

if TYPE_CHECKING:
    from lorasrv.engine.request_stream import RequestStream

Prompt = str | Sequence[int]
AddPrompt = Callable[[Prompt], "Awaitable[Sequence[RequestStream]]"]
"""Adds one prompt to the engine and returns its answers."""


class AdmittingEngine(Protocol):
    """Declare the engine's early check of requests; `AsyncEngine` implements it."""

    def check_admission(self, principal: str) -> None: ...


@dataclass(frozen=True, slots=True)
class AdmissionController:
    """Admit requests to one engine."""

    engine: AdmittingEngine
    rate_limiter: RateLimiter

    async def check(self, caller: Caller) -> None:
        """Check that one more request could be admitted now.

        Raises: EngineOverloaded, LimitExceeded.
        """
        self.engine.check_admission(caller.principal)
        await self.rate_limiter.prepare(caller)
        self.rate_limiter.check(caller)

    async def admit(
        self, caller: Caller, prompts: Sequence[Prompt], width: int, begin: Callable[[], Awaitable[AddPrompt]]
    ) -> list[OutputStream]:
        """Admit all prompts of a request, or none.

        Answers count against the key's limits until they end or are closed. If a prompt is refused, none counts.

        Args:
            caller: caller whose limits apply.
            prompts: texts, or token ids.
            width: number of answers per prompt.
            begin: does work once for all prompts, such as compiling a grammar, when the request already counts, and
                returns the function that adds a prompt.
        Returns: the answers, `width` per prompt.
        Raises:
            EngineOverloaded, LimitExceeded: it cannot be admitted now; the error names the limit.
            InvalidRequest: the request exceeds the key's limits or the context, so it can never be admitted.
            LorasrvError, AdapterError: from `begin` or the engine.
        """
        await self.rate_limiter.prepare(caller, len(prompts), len(prompts) * width)
        reservation = self.rate_limiter.reserve(caller, len(prompts), len(prompts) * width)
        streams: list[OutputStream] = []
        try:
            add = await begin()
            for prompt in prompts:
                added = await add(prompt)
                streams += added if reservation is None else reservation.count(added)
        except BaseException as error:
            if reservation is not None:
                reservation.refuse()
            for stream in streams:
                await stream.aclose(cause_of(error))
            raise
        return streams
