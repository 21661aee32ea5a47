"""Whether a request may come in: there is room for it in the engine's queue, and its key's limits allow it.

Asked twice, in the same order and with the same errors: once before anything is done for a request, so that a flood
costs little, and once when it is understood, with what it takes. Each refusal is counted once, by the engine's
observers.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from api.auth.principal import Caller
from api.auth.rate_limits import RateLimiter
from lorasrv.outputs import OutputStream

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine
    from lorasrv.engine.output_processor import RequestStream

Prompt = str | Sequence[int]
AddPrompt = Callable[[Prompt], "Awaitable[Sequence[RequestStream]]"]
"""Asks the engine for the answers to one prompt."""


@dataclass(frozen=True, slots=True)
class AdmissionController:
    """Admit requests to one engine."""

    engine: "AsyncEngine"
    allowances: RateLimiter

    def check(self, caller: Caller) -> None:
        """Check that one more request could come in now.

        Raises: EngineOverloaded, LimitExceeded.
        """
        self.engine.check_admission(caller.principal)
        self.allowances.check(caller)

    async def admit(
        self, caller: Caller, prompts: Sequence[Prompt], width: int, begin: Callable[[], Awaitable[AddPrompt]]
    ) -> list[OutputStream]:
        """Return the answers, `width` to each prompt. They count until they have ended or are closed; if one is refused
        all are, and none counts.

        Args:
            begin: does what has to be done once for all prompts, such as compiling a grammar, while they count already.

        Raises:
            EngineOverloaded, LimitExceeded: not now; says which limit.
            InvalidRequest: it is more at once than the key may ever have, or than could ever fit.
            LorasrvError, AdapterError: what `begin` and the engine raise.
        """
        reservation = self.allowances.reserve(caller, len(prompts), len(prompts) * width)
        streams: list[OutputStream] = []
        try:
            add = await begin()
            for prompt in prompts:
                added = await add(prompt)
                streams += added if reservation is None else reservation.count(added)
        except BaseException:
            if reservation is not None:
                reservation.refuse()
            for stream in streams:
                await stream.aclose()
            raise
        return streams
