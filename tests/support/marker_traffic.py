"""Requests for marker adapters over HTTP while names change, and the permitted answers of each.

Every name has a set of current meanings: the old and the new one while a change is in progress, only the new one once
it is acknowledged. A request may be answered by any adapter that its name could mean between sending the request and
the beginning of its answer, but by only one of them, for all tokens of all choices.
"""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import markers as m
from marker_served import Prompt, said_in

GONE = None
"""Meaning of a deleted name."""
Meaning = int | None


class Wrong(AssertionError):
    """Report an answer that the server must not give."""


@dataclass(eq=False)
class Name:
    """An id, or an alias (`mia:prod`)."""

    name: str
    possible: set[Meaning] = field(default_factory=lambda: {GONE})
    asked: "set[Asked]" = field(default_factory=set)
    is_breaking: bool = False
    """Whether its requests are being ended, also new ones, which may end before the change is acknowledged."""

    def begin(self, meaning: Meaning) -> None:
        """Record that a change to this meaning was sent."""
        self.possible.add(meaning)
        for asked in self.asked:
            if not asked.is_decided:
                asked.allowed.add(meaning)

    def settle(self, meaning: Meaning) -> None:
        """Record that the change was acknowledged."""
        self.possible, self.is_breaking = {meaning}, False

    def decide(self) -> None:
        """Record that all requests so far were accepted: later changes do not affect them."""
        for asked in self.asked:
            asked.is_decided = True

    def break_off(self) -> None:
        """Record that the name's requests are being ended, until `settle`."""
        self.is_breaking = True
        for asked in self.asked:
            asked.may_break = True


@dataclass(frozen=True)
class Ask:
    """A request. The client disconnects after `leave_after_s`, or after `leave_after_tokens` (streams only)."""

    name: str
    prompt: Prompt
    max_tokens: int = 8
    route: str = "completions"
    stream: bool = False
    n: int = 1
    leave_after_s: float | None = None
    leave_after_tokens: int | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        if self.route == "tgi":
            return "/generate_stream" if self.stream else "/generate"
        return "/v1/chat/completions" if self.route == "chat" else "/v1/completions"

    def body(self) -> dict[str, Any]:
        if self.route == "tgi":
            parameters = {"adapter_id": self.name, "max_new_tokens": self.max_tokens, "ignore_eos_token": True}
            return {"inputs": self.prompt.text, "parameters": parameters}
        body = {"model": self.name, "max_tokens": self.max_tokens, "ignore_eos": True, "stream": self.stream}
        body |= {"temperature": 1, "top_k": 1, "seed": 1, "n": self.n} if self.n > 1 else {"temperature": 0}
        if self.route == "chat":
            return body | {"messages": [{"role": "user", "content": self.prompt.text}]} | dict(self.fields)
        return body | {"prompt": list(self.prompt.ids)} | dict(self.fields)


@dataclass(eq=False)
class Asked:
    """The facts known about one answer."""

    ask: Ask
    allowed: set[Meaning]
    is_decided: bool = False
    """Whether the answer has begun: later changes do not affect it."""
    may_break: bool = False
    status: int = 0
    error: str | None = None
    retry_after: str | None = None
    digest: str | None = None
    texts: dict[int, str] = field(default_factory=dict)
    left: bool = False


class Traffic:
    """Send requests to a server, check every answer, and count outcomes."""

    def __init__(self, http: httpx2.AsyncClient, base_name: str = "marked") -> None:
        self.http = http
        self.names: dict[str, Name] = {base_name: Name(base_name, {-1})}
        self.tally: Counter[str] = Counter()
        self.digests: dict[str, int] = {}
        """Content -> the number of its marker, from the answers to uploads."""

    def name(self, name: str) -> Name:
        return self.names.setdefault(name, Name(name))

    async def ask(self, ask: Ask) -> Asked:
        """Send a request and read its answer to the end.

        Raises:
            Wrong: the answer is not permitted.
        """
        name = self.name(ask.name)
        asked = Asked(ask, set(name.possible), may_break=name.is_breaking)
        name.asked.add(asked)
        try:
            async with asyncio.timeout(ask.leave_after_s):
                await self._receive(asked)
        except TimeoutError:
            asked.left = True
        finally:
            name.asked.discard(asked)
        self._check(asked)
        return asked

    async def _receive(self, asked: Asked) -> None:
        ask = asked.ask
        async with self.http.stream("POST", ask.path, json=ask.body()) as response:
            asked.is_decided = True
            asked.status = response.status_code
            asked.digest = response.headers.get("x-adapter-digest")
            asked.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                asked.error = _code(json.loads(await response.aread()))
            elif ask.stream:
                await self._read_stream(asked, response)
            else:
                self._take(asked, json.loads(await response.aread()))

    async def _read_stream(self, asked: Asked, response: httpx2.Response) -> None:
        events, ended = 0, False
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not data or data == "[DONE]":
                ended = ended or bool(data)
                continue
            event = json.loads(data)
            if "error" in event:
                asked.error = _code(event)
                return
            self._take(asked, event)
            events += 1
            if asked.ask.leave_after_tokens is not None and events >= asked.ask.leave_after_tokens:
                asked.left = True
                return
        if not ended and asked.ask.route != "tgi":
            raise Wrong(f"{asked.ask}: the stream broke off without an end or an error")

    def _take(self, asked: Asked, event: Any) -> None:
        if asked.ask.route == "tgi":
            event = event[0] if isinstance(event, list) else event
            piece = event["token"]["text"] if "token" in event else event["generated_text"]
            asked.texts[0] = asked.texts.get(0, "") + piece
            return
        for choice in event["choices"]:
            part = choice.get("text")
            if part is None:
                part = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            asked.texts[choice["index"]] = asked.texts.get(choice["index"], "") + part

    def _check(self, asked: Asked) -> None:
        ask = asked.ask
        said = {index: said_in(text) for index, text in asked.texts.items() if not asked.left or text}
        speakers = {one.marker for tokens in said.values() for one in tokens}
        allowed = {m.marker(None if number == -1 else number) for number in asked.allowed if number is not GONE}
        what = f"{ask.path} {ask.name} (stream {ask.stream}, n {ask.n}, digest {asked.digest})"
        if len(speakers) > 1 or not speakers <= allowed:
            raise Wrong(f"{what}: expected one of {sorted(allowed)}, got {sorted(speakers)}")
        for one in (one for tokens in said.values() for one in tokens):
            if one.topic not in ask.prompt.topics:
                raise Wrong(f"{what}: topic {one.topic} is not in its prompt, which has {set(ask.prompt.topics)}")
        if speakers and asked.digest in self.digests:
            claimed = m.marker(self.digests[asked.digest])
            if speakers != {claimed}:
                raise Wrong(f"{what}: its digest is that of {claimed}, its tokens are {speakers}")
        self.tally["tokens"] += sum(map(len, said.values()))
        self._check_end(asked, what, {index: len(tokens) for index, tokens in said.items()})

    def _check_end(self, asked: Asked, what: str, lengths: dict[int, int]) -> None:
        ask = asked.ask
        if asked.left:
            self.tally["left"] += 1
        elif asked.status == 404:
            if GONE not in asked.allowed and not asked.may_break:
                raise Wrong(f"{what}: 404 {asked.error}, but the name was there all the time")
            self.tally["404"] += 1
        elif asked.may_break and _is_of_deletion(asked.error):
            self.tally["ended by force"] += 1
        elif asked.status == 429:
            if asked.retry_after is None:
                raise Wrong(f"{what}: 429 without Retry-After")
            self.tally["429"] += 1
        elif asked.status != 200 or asked.error is not None:
            raise Wrong(f"{what}: {asked.status} {asked.error}")
        else:
            if lengths != dict.fromkeys(range(ask.n), ask.max_tokens):
                raise Wrong(f"{what}: {ask.max_tokens} tokens were asked for, got {lengths}")
            self.tally["answered"] += 1
            self.tally[f"{ask.route}{', stream' if ask.stream else ''}{', n' if ask.n > 1 else ''}"] += 1


def _is_of_deletion(error: str | None) -> bool:
    return error is not None and (error == "adapter_deleted" or "was deleted" in error)


def _code(body: dict[str, Any]) -> str:
    """Return the code of an error in OpenAI's shape, or the message in TGI's shape, which has no code."""
    error = body.get("error")
    return str(error.get("code")) if isinstance(error, dict) else str(error)
