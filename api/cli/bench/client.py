"""Send requests and time their streams, using only what every OpenAI-compatible server supports."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from api.cli.bench.connections import Address, Connection, Connections, Cut, NotConnected
from api.client import CONNECT_S


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Describe a streamed completion of exactly `max_tokens` tokens."""

    model: str
    prompt: str
    max_tokens: int
    # False for the base.
    has_adapter: bool = True
    # Seconds after the beginning at which to send it; None: no fixed time.
    at_s: float | None = None


@dataclass(slots=True)
class RequestOutcome:
    """Record the times of a request, on the performance counter's clock."""

    model: str
    has_adapter: bool
    sent_s: float
    # Times of events with text.
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    # Kind of failure, for the counts of failures; None: the request was answered.
    failure: str | None = None
    detail: str = ""

    def fail(self, kind: str, detail: str) -> None:
        self.failure, self.detail = kind, detail[:300]

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def last_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def ttft_ms(self) -> float:
        """Return the time to the first event with text."""
        return 1e3 * (self.first_s - self.sent_s)

    @property
    def e2e_ms(self) -> float:
        """Return the time from sending to the end."""
        return 1e3 * (self.last_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean time per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Return the times between events with text: the times between tokens if the server sends each token in its own
        event.
        """
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.arrivals_s)]


class MalformedResponse(Exception):
    """Report an event that is not a JSON object."""


class BenchClient:
    """Request completions from one server concurrently, without a proxy.

    Args:
        timeout_s: longest time without an event.
        keeps: whether connections are reused.
    """

    def __init__(
        self,
        url: str,
        *,
        chat: bool = False,
        key: str | None = None,
        timeout_s: float = 600.0,
        keeps: bool = True,
    ) -> None:
        address = Address.of(url)
        self._path = address.path + ("/v1/chat/completions" if chat else "/v1/completions")
        self._chat, self._timeout_s = chat, timeout_s
        self._connections = Connections(address, max(CONNECT_S, min(timeout_s, 60.0)))
        self._headers = [
            ("host", address.name),
            ("content-type", "application/json"),
            ("connection", "keep-alive" if keeps else "close"),
            *([("authorization", f"Bearer {key}")] if key else []),
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connections.close()

    async def send(self, request: BenchRequest) -> RequestOutcome:
        """Send a request. Errors of the server or the network are recorded, not raised."""
        outcome = RequestOutcome(request.model, request.has_adapter, time.perf_counter())
        try:
            async with self._connections.lent() as connection:
                connection.send(self._path, self._headers, json.dumps(self.body(request)).encode())
                await self._answer(connection, outcome)
        except NotConnected as error:
            outcome.fail("unreachable", str(error))
        except TimeoutError:
            outcome.fail("timeout", f"no event for {self._timeout_s:g} s")
        except Cut as error:
            outcome.fail("cut stream", str(error))
        except MalformedResponse as error:
            outcome.fail("malformed event", str(error))
        outcome.ended_s = time.perf_counter()
        if outcome.failure is None:
            _check(outcome, request.max_tokens)
        return outcome

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the body of a request."""
        prompt = request.prompt
        content = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": request.model, **content, "max_tokens": request.max_tokens, **fixed}

    async def _answer(self, connection: Connection, outcome: RequestOutcome) -> None:
        """Read an answer. Raises: TimeoutError: nothing arrived for `timeout_s`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s) as limit:

            async def body() -> AsyncIterator[bytes]:
                async for data in connection.body():
                    limit.reschedule(loop.time() + self._timeout_s)
                    yield data

            if (status := await connection.status()) == 200:
                await self._watch(body(), outcome)
            else:
                text = b"".join([data async for data in body()]).decode(errors="replace")
                outcome.fail(f"HTTP {status}", _message(text))

    async def _watch(self, body: AsyncIterable[bytes], outcome: RequestOutcome) -> None:
        ended, event_s = False, 0.0
        async for line in _lines(body):
            if not line.startswith("data:"):
                continue
            if line.endswith("[DONE]"):
                ended = True
                continue
            event = _event(line[5:])
            if event.get("error"):
                outcome.fail("error event", _message(json.dumps(event)))
                return
            try:
                event_s = self._take(event, outcome) or event_s
            except (AttributeError, TypeError, KeyError, IndexError):
                raise MalformedResponse(line[5:].strip()) from None
        if not ended:
            outcome.fail("cut stream", "the stream ended without its last event")
        elif not outcome.arrivals_s and event_s:
            # Tokens without text, as with random weights: only the last event has a time.
            outcome.arrivals_s.append(event_s)

    def _take(self, event: dict[str, Any], outcome: RequestOutcome) -> float | None:
        """Record usage and text of an event; return its time if it contains a choice."""
        if usage := event.get("usage"):
            _take_usage(outcome, usage)
        choices = event.get("choices")
        if not choices:
            return None
        now = time.perf_counter()
        if self._text(choices[0]):
            outcome.arrivals_s.append(now)
        return now

    def _text(self, choice: dict[str, Any]) -> object:
        if not self._chat:
            return choice.get("text")
        delta = choice.get("delta") or {}
        return delta.get("content") or delta.get("reasoning_content")


async def _lines(body: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Yield the lines of a body, without line ends."""
    begun = b""
    async for data in body:
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r").decode(errors="replace")
    if begun:
        yield begun.decode(errors="replace")


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        raise MalformedResponse(text.strip()) from None
    if not isinstance(event, dict):
        raise MalformedResponse(text.strip())
    return event


def _take_usage(outcome: RequestOutcome, usage: dict[str, Any]) -> None:
    outcome.prompt_tokens = usage.get("prompt_tokens") or 0
    outcome.output_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _check(outcome: RequestOutcome, wanted: int) -> None:
    if outcome.prompt_tokens == 0:
        outcome.fail("no usage", "the stream does not report usage, so tokens cannot be counted")
    elif outcome.output_tokens != wanted:
        outcome.fail("wrong token count", f"{outcome.output_tokens} tokens instead of {wanted}")
    elif not outcome.arrivals_s:
        outcome.fail("no text", "no event contained a choice")


def _message(text: str) -> str:
    """Return the message of an error body, or the body."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip()
