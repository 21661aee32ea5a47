"""Several answers as one stream: each output with the index of its choice, in the order they come."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from api.errors import ApiError
from lorasrv.outputs import FinishReason, OutputStream, RequestOutput


class ChoiceStream:
    """The outputs of all streams of one request, `width` for each of its prompts. Ends when the last choice has ended;
    one that fails fails them all. `unanswered`: of each only the prompt is told, as if nothing had been generated.

    A task for each stream waits for its next output, and then until somebody has room for it: for a client that reads
    slowly little is kept here. Must be closed, also when it has ended.

    Raises (from iteration):
        LorasrvError, AdapterError, ApiError: a choice has failed; what came before is no answer.
    """

    def __init__(self, streams: Sequence[OutputStream], width: int | None = None, *, unanswered: bool = False) -> None:
        self.width = width or len(streams)
        self._unanswered = unanswered
        self.latest: dict[int, RequestOutput] = {}
        self.first_token_s: float | None = None
        self._streams = streams
        self._num_unfinished = len(streams)
        self._ahead: tuple[int, RequestOutput] | None = None
        self._arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))
        self._pumps = [asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(streams)]

    def firsts(self) -> list[RequestOutput]:
        """Of each prompt, what the first choice that has come said last."""
        indices = {index // self.width: index for index in sorted(self.latest, reverse=True)}
        return [self.latest[indices[prompt]] for prompt in sorted(indices)]

    def __aiter__(self) -> "ChoiceStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._ahead is not None:
            taken, self._ahead = self._ahead, None
            return taken
        if not self._num_unfinished:
            raise StopAsyncIteration
        return await self._take()

    async def wait_for_first(self) -> None:
        """Until something has come, which stays in the stream. Raises: as iteration; then it is closed."""
        try:
            self._ahead = await self._take()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the choices that have not ended."""
        for pump in self._pumps:
            pump.cancel()
        # Before anything is awaited that takes time: whoever is cancelled meanwhile has still ended every request.
        for stream in self._streams:
            await stream.aclose()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _take(self) -> tuple[int, RequestOutput]:
        index, output = await self._arrived.get()
        if isinstance(output, Exception):
            raise output
        if output.finish_reason is FinishReason.ERROR:
            # The same request would fail again: clients are not to repeat it.
            never = {"x-should-retry": "false"}
            raise ApiError(500, output.error or "the generation failed", code="generation_failed", headers=never)
        if self._unanswered:
            output = _without_answer(output)
        if self.first_token_s is None and output.num_generated_tokens:
            self.first_token_s = time.monotonic()
        self.latest[index] = output
        self._num_unfinished -= output.finished
        return index, output

    async def _pump(self, index: int, stream: OutputStream) -> None:
        try:
            finished = False
            while not finished:
                output = await anext(stream)
                finished = output.finished
                await self._arrived.put((index, output))
        except Exception as error:
            await self._arrived.put((index, error))


def _without_answer(output: RequestOutput) -> RequestOutput:
    """The one token that the engine generates at least is not what was asked for."""
    reason = FinishReason.LENGTH if output.finished else None
    return replace(
        output,
        text="",
        token_ids=(),
        num_generated_tokens=0,
        finish_reason=reason,
        stop_reason=None,
        logprobs=(),
        text_offsets=(),
    )
