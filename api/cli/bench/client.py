"""Send requests and time their streams, using only what every OpenAI-compatible server supports."""

import itertools
import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2

from api.asgi.address import is_loopback
from api.client import CONNECT_S


@dataclass(frozen=True, slots=True)
class Ask:
    """Describe a streamed completion of exactly `max_tokens` tokens."""

    model: str
    prompt: str
    max_tokens: int
    # False for the base.
    has_adapter: bool = True
    # When to send it after the beginning, if fixed.
    at_s: float | None = None


@dataclass(slots=True)
class RequestOutcome:
    """Record the times of a request, on the performance counter's clock."""

    model: str
    has_adapter: bool
    sent_s: float
    # One per event with text.
    arrivals_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    # Kind of failure, by which failures are counted.
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
        """Return the times between events with text, which are those between tokens if the server sends them one by
        one.
        """
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.arrivals_s)]


class MalformedResponse(Exception):
    """Report an event that is not a JSON object."""


class BenchClient:
    """Request completions from one server concurrently. `timeout_s` bounds the time without an event."""

    def __init__(
        self,
        url: str,
        *,
        chat: bool = False,
        key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=max(CONNECT_S, min(timeout_s, 60.0)), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not is_loopback(urlsplit(url).hostname or ""),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, ask: Ask) -> RequestOutcome:
        """Send a request. Errors of the server or the network are recorded, not raised."""
        outcome = RequestOutcome(ask.model, ask.has_adapter, time.perf_counter())
        try:
            async with self._http.stream("POST", self._path, json=self.body(ask)) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    outcome.fail(f"HTTP {response.status_code}", _message(text))
                else:
                    await self._watch(response, outcome)
        except httpx2.ConnectError as error:
            outcome.fail("unreachable", str(error) or type(error).__name__)
        except httpx2.TimeoutException as error:
            outcome.fail("timeout", str(error) or type(error).__name__)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, httpx2.CookieConflict) as error:
            outcome.fail("cut stream", str(error) or type(error).__name__)
        except MalformedResponse as error:
            outcome.fail("malformed event", str(error))
        outcome.ended_s = time.perf_counter()
        if outcome.failure is None:
            _check(outcome, ask.max_tokens)
        return outcome

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request."""
        content = {"messages": [{"role": "user", "content": ask.prompt}]} if self._chat else {"prompt": ask.prompt}
        fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": ask.model, **content, "max_tokens": ask.max_tokens, **fixed}

    async def _watch(self, response: httpx2.Response, outcome: RequestOutcome) -> None:
        ended, event_s = False, 0.0
        async for line in response.aiter_lines():
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
            # Tokens without text, as with random weights: the last event is the only time.
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
