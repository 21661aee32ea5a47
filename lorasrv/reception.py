"""What happens to a request before it is accepted, beside the event loop: its text becomes tokens, its adapter's layout
is found, and what can never fit is refused.

A layout that is not known yet is read from a file's header, and a disk may take its time. Such requests have threads of
their own, so that nobody else waits with them.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Unpack

from lorasrv.admission import MAX_TIMEOUT_S, Admission, RequestOptions, check_could_fit, further_choices
from lorasrv.errors import RequestTimeout
from lorasrv.poison import PoisonGuard
from lorasrv.request import AddRequest, RequestId
from lorasrv.sampling import SamplingParams
from lorasrv.tokenizer import Tokenizer

NUM_READERS = 8
LEAST_S = 1e-3
"""What is left at least of a request's time once it is accepted: the engine says then that it is over."""


class Reception:
    """For the event loop's thread. `queue_timeout_s`: the server's; None waits for ever."""

    def __init__(
        self,
        admission: Admission,
        tokenizer: Tokenizer,
        max_model_len: int,
        poison: PoisonGuard,
        queue_timeout_s: float | None,
    ) -> None:
        self._admission = admission
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._poison = poison
        self._queue_timeout_s = queue_timeout_s
        self._readers = ThreadPoolExecutor(NUM_READERS, "lorasrv-header")

    async def receive(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> list[AddRequest]:
        """The messages of all choices.

        Raises: as `Admission.admit`; PoisonRequest; RequestTimeout: the disk took all of the time that there is.
        """
        adapter = options.get("adapter")
        work = partial(self._understood, request_ids, prompt, sampling, options)
        if adapter is None or self._admission.knows_layout(adapter):
            return await asyncio.to_thread(work)
        reading = asyncio.get_running_loop().run_in_executor(self._readers, work)
        return await self._in_time(reading, options.get("timeout_s"))

    def close(self) -> None:
        """Nobody comes any more; who is being received is not waited for."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def _in_time(self, reading: Awaitable[list[AddRequest]], timeout_s: float | None) -> list[AddRequest]:
        """Its messages, with what is left of their time. A `timeout_s` that is none is for admission to refuse."""
        own_s = timeout_s if timeout_s is not None and 0 < timeout_s <= MAX_TIMEOUT_S else None
        limits = (("timeout_s,", own_s), ("the server's queue timeout of", self._queue_timeout_s))
        bounds = [(seconds, name) for name, seconds in limits if seconds is not None]
        most_s, name = min(bounds, default=(None, ""))
        began_s = time.monotonic()
        try:
            messages = await asyncio.wait_for(reading, most_s)
        except TimeoutError:
            raise RequestTimeout(f"its adapter could not be looked up within {name} {most_s:g} s") from None
        if own_s is None:
            return messages
        left_s = max(LEAST_S, own_s - (time.monotonic() - began_s))
        return [replace(message, timeout_s=left_s) for message in messages]

    def _understood(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
    ) -> list[AddRequest]:
        if isinstance(prompt, str):
            check_could_fit([prompt], self._tokenizer, self._max_model_len, "prompt")
        ids = self._tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        first = self._admission.admit(request_ids[0], ids, sampling, **options)
        self._poison.check(first)
        return [first, *further_choices(first, request_ids[1:])]
