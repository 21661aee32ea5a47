"""The events of one streamed answer, in any protocol: iterated over, or written as the engine's outputs come.

Most tokens of a stream take the fast path: from the engine's outputs to the connection in one call, without waking the
request's task. That task handles the rest: outputs that a slow client could not take yet, the end, and errors.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from adapter_store.errors import AdapterError
from api.asgi.sse import ChunkSender
from api.errors import ApiError
from api.serving.choice_stream import ChoiceStream
from lorasrv.errors import LorasrvError
from lorasrv.outputs import RequestOutput


class EventWriter(Protocol):
    """Write the events of one stream in a protocol's format: `ChunkEvents`, `ResponseEvents`, `TokenEvents`."""

    def write(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of a choice's output; b"" if it has none."""

    def end(self) -> bytes:
        """Return the closing events."""

    def fail(self, error: Exception) -> bytes:
        """Return the closing events of a failed answer."""


class AnswerEvents:
    """Stream one answer, without the events that its client already has from another replica."""

    def __init__(self, choices: ChoiceStream, writer: EventWriter) -> None:
        self._choices, self._writer = choices, writer

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events that `push_to` has not written."""
        try:
            async for index, output in self._choices:
                events = self._writer.write(index, output)
                if events and not self._choices.is_repeated:
                    yield events
            if ending := self._writer.end():
                yield ending
        except (LorasrvError, AdapterError, ApiError) as error:
            yield self._choices.mark_failure(error) + self._writer.fail(error)

    def push_to(self, sender: ChunkSender) -> None:
        """Write events to a connection as they come, while its client keeps up."""

        def write(index: int, output: RequestOutput) -> None:
            if events := self._writer.write(index, output):
                sender.write(events)

        self._choices.pass_to(write, lambda: sender.can_write)
