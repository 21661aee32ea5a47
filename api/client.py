"""A small client of the server, for the command line: uploads, lists, streams. No torch, no engine."""

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx2

from adapter_store.formats.peft_dir import PeftDir, digest_file
from api.asgi.address import DEFAULT_SERVER, is_loopback

CHUNK_BYTES = 1 << 20
# An answer may wait long for its first token on a busy server; connecting may not.
ANSWER_S, CONNECT_S = 600.0, 5.0
TIMEOUT = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
MAX_SENDS = 3
BUSY = (429, 503)
_MISSING = frozenset({"blob_not_found", "adapter_corrupt"})
ByteProgress = Callable[[str, int, int], None]
"""Called with what is done (hashing, sending), bytes done and bytes in all."""


class ServerUnreachable(Exception):
    """Nothing answers at the server's address, or it stopped answering."""


class Refused(Exception):
    """The server said no. `error` is the body's error object; `retry_after_s` when it may say yes to the same, None if
    it did not tell.
    """

    def __init__(self, status: int, error: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        super().__init__(str(error.get("message") or f"the server answered {status}"))
        self.status = status
        self.error = error
        self.retry_after_s = retry_after_s

    @property
    def problems(self) -> list[str]:
        """Every problem of a refused adapter, a line each."""
        return [problem_line(problem) for problem in self.error.get("details") or []]


def problem_line(problem: Mapping[str, Any]) -> str:
    """`where: what is wrong (code)`."""
    where = f"{problem['field']}: " if problem["field"] else ""
    return f"{where}{problem['message']} ({problem['code']})"


@dataclass
class Choice:
    """One of the answers to a request. `logprobs`: an entry a token, as OpenAI's chat has them."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class StreamedAnswer:
    """An answer as it arrives: iterate for pieces of text; the rest is known when the iteration ends."""

    headers: Mapping[str, str]
    events: Iterator[Mapping[str, Any]]
    usage: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def finish_reason(self) -> str | None:
        """Of the last choice, None while it is not there."""
        return self.choices[max(self.choices)].finish_reason if self.choices else None

    def close(self) -> None:
        """End it before its end: the server stops computing."""
        if isinstance(self.events, Generator):
            self.events.close()

    def __iter__(self) -> Iterator[str]:
        for payload in self.events:
            if "error" in payload:
                raise Refused(500, payload["error"])
            self.usage = payload.get("usage") or self.usage
            for told in payload["choices"]:
                choice = self.choices.setdefault(told.get("index", 0), Choice())
                choice.finish_reason = told["finish_reason"] or choice.finish_reason
                choice.logprobs += _token_logprobs(told.get("logprobs") or {})
                if text := _text(told):
                    choice.text += text
                    yield text


def _text(told: Mapping[str, Any]) -> str:
    """Of a piece of a choice or of a whole one, of a chat or of a plain completion."""
    said = told.get("delta") or told.get("message")
    return str((said.get("content") if said else told.get("text")) or "")


def _token_logprobs(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An entry a token, whichever of OpenAI's two shapes they have."""
    if "tokens" not in told:
        return told.get("content") or []
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": other, "logprob": of_other} for other, of_other in (top or {}).items()],
        }
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    ]


def _comes_whole(body: Mapping[str, Any]) -> bool:
    """Whether what is asked cannot be streamed: the answer is one of several that are all computed first."""
    tried, shown = body.get("best_of"), body.get("n")
    chosen = isinstance(tried, int) and tried > (shown if isinstance(shown, int) else 1)
    return chosen or bool(body.get("use_beam_search")) or body.get("prompt_logprobs") is not None


class Client:
    """One server. Its methods return parsed JSON.

    Raises (all methods):
        ServerUnreachable, Refused.
    """

    def __init__(self, url: str = DEFAULT_SERVER, key: str | None = None, *, wait_s: float | None = None) -> None:
        """`wait_s`: give up on a server that is silent for so long; None: as long as an answer may take."""
        self.url = url.rstrip("/")
        # A proxy from the environment has no business with this machine's own address.
        trust_env = not is_loopback(urlsplit(self.url).hostname or "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = TIMEOUT if wait_s is None else httpx2.Timeout(wait_s)
        self._http = httpx2.Client(base_url=self.url, timeout=timeout, trust_env=trust_env, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def base_name(self) -> str:
        """What the server calls its base."""
        return str(self._json("GET", "/v1/models", params={"limit": 1})["data"][0]["id"])

    def models(self) -> list[dict[str, Any]]:
        """Cards of everything that may be asked, as any OpenAI-compatible server lists it."""
        return [card for card in self._json("GET", "/v1/models").get("data") or [] if isinstance(card, dict)]

    def get(self, path: str, **params: object) -> dict[str, Any]:
        """A JSON object that stands at a path."""
        return self._json("GET", path, params=params)

    def name_of(self, reference: str) -> str:
        """What the server calls the base, an adapter, one of its versions or an alias; it must be there."""
        return str(self._json("GET", f"/v1/models/{quote(reference, safe='')}")["id"])

    def adapters(self) -> list[dict[str, Any]]:
        adapters: list[dict[str, Any]] = self._json("GET", "/v1/adapters")["data"]
        return adapters

    def adapter(self, adapter_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/adapters/{quote(adapter_id, safe='')}")

    def stats(self, adapter_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/adapters/{quote(adapter_id, safe='')}/stats")

    def delete(self, reference: str, *, force: bool = False, wait_s: float = 0.0) -> dict[str, Any]:
        """Remove an id or a version; with `force` also the aliases that name it, and its requests end. Waits for those
        that run, at most so long."""
        params = {**({"force": "true"} if force else {}), **({"wait": f"{wait_s:g}"} if wait_s else {})}
        return self._json("DELETE", f"/v1/adapters/{quote(reference, safe='')}", params=params)

    def change(self, adapter_id: str, body: Mapping[str, Any], *, etag: str | None = None) -> dict[str, Any]:
        """Move an id or its aliases to other versions; with `etag` only from the state that has it."""
        headers = {} if etag is None else {"if-match": f'"{etag}"'}
        return self._json("PATCH", f"/v1/adapters/{quote(adapter_id, safe='')}", json=dict(body), headers=headers)

    def warm(self, reference: str, deadline_ms: int | None = None) -> dict[str, Any]:
        """Bring an adapter to the pool; answers when it is there, or at the deadline (None: the server's)."""
        body = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
        timeout = httpx2.Timeout(ANSWER_S + (deadline_ms or 0) / 1000, connect=CONNECT_S)
        return self._json("POST", f"/v1/adapters/{quote(reference, safe='')}:warm", json=body, timeout=timeout)

    def verify(self, reference: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Compare an adapter with PEFT: `{"progress": [what, share]}` as it goes on, and at last the verdict."""
        path = f"/v1/adapters/{quote(reference, safe='')}:verify"
        timeout = httpx2.Timeout(ANSWER_S + body.get("timeout_s", 0.0), connect=CONNECT_S)
        request = self._http.build_request("POST", path, json={**body, "stream": True}, timeout=timeout)
        with _reaching(self.url):
            response = self._http.send(request, stream=True)
            if response.status_code >= 400:
                response.read()
                raise _refusal(response)
        for event in self._events(response):
            if "error" in event:
                raise Refused(500, event["error"])
            yield event

    def pin(self, reference: str, *, pinned: bool) -> dict[str, Any]:
        """Keep an adapter in the pool, or let it go."""
        return self._json("PATCH", f"/v1/adapters/{quote(reference, safe='')}", json={"pinned": pinned})

    def limit(self, adapter_id: str, limits: Mapping[str, float]) -> dict[str, float]:
        """Replace the limits of an id; none at all take them away. Returns them."""
        body = {"limits": dict(limits)}
        done: dict[str, float] = self._json("PATCH", f"/v1/adapters/{quote(adapter_id, safe='')}", json=body)["limits"]
        return done

    def pool(self) -> dict[str, Any]:
        """Whose the pool's pages are."""
        return self._json("GET", "/v1/pool")

    def upload(
        self,
        peft: PeftDir,
        adapter_id: str,
        *,
        if_not_exists: bool = False,
        alias: str | None = None,
        allow_partial: bool = False,
        send_always: bool = True,
        progress: ByteProgress | None = None,
    ) -> dict[str, Any]:
        """Hash the weights, send them, register them, and move the alias to them; the server's report.

        Without `send_always` the weights are sent only if the server cannot do with those of that digest that it has:
        there are none, or they are damaged. What it has already is checked there and nothing else.
        """
        tell = progress or (lambda *_: None)
        digest = digest_file(peft.weights_path, lambda done, total: tell("hashing", done, total))
        body = {
            "id": adapter_id,
            "config": peft.config,
            "weights": f"sha256:{digest}",
            "if_not_exists": if_not_exists,
            **({} if alias is None else {"alias": alias}),
            **({"allow_partial": True} if allow_partial else {}),
        }
        sends = 0
        if send_always:
            self._send(peft.weights_path, digest, tell)
            sends = 1
        while True:
            try:
                return self._json("POST", "/v1/adapters", json=body)
            except Refused as error:
                # What was sent may be gone: another adapter of the same weights was refused meanwhile. And what was
                # there may be damaged in its header, which looks like a bad adapter.
                again = _MISSING if sends else _MISSING | {"invalid_adapter"}
                if sends == MAX_SENDS or error.error.get("code") not in again:
                    raise
            self._send(peft.weights_path, digest, tell)
            sends += 1

    def _send(self, weights: Path, digest: str, tell: ByteProgress) -> None:
        length = weights.stat().st_size
        self._json(
            "PUT",
            f"/v1/blobs/sha256:{digest}",
            content=_read_chunks(weights, lambda done: tell("sending", done, length)),
            headers={"content-length": str(length), "content-type": "application/octet-stream"},
        )

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name, labels as they are written there."""
        with _reaching(self.url):
            response = self._http.get("/metrics")
        if response.status_code >= 400:
            raise _refusal(response)
        samples = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", response.text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def chat(self, body: Mapping[str, Any]) -> StreamedAnswer:
        """Ask, streaming where that is possible; `body` as OpenAI has it, without the stream fields."""
        return self._ask("/v1/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> StreamedAnswer:
        """The same with a prompt that goes to the model as it is."""
        return self._ask("/v1/completions", body)

    def _ask(self, path: str, body: Mapping[str, Any]) -> StreamedAnswer:
        whole = _comes_whole(body)
        asked = body if whole else {**body, "stream": True, "stream_options": {"include_usage": True}}
        request = self._http.build_request("POST", path, json=dict(asked))
        with _reaching(self.url):
            response = self._http.send(request, stream=True)
            if whole or response.status_code >= 400:
                response.read()
            if response.status_code >= 400:
                raise _refusal(response)
        return StreamedAnswer(
            dict(response.headers), iter([self._parsed(response)]) if whole else self._events(response)
        )

    def _events(self, response: httpx2.Response) -> Iterator[Mapping[str, Any]]:
        try:
            with _reaching(self.url):
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield json.loads(line[len("data: ") :])
                raise ServerUnreachable(f"the server at {self.url} closed the stream before its end")
        finally:
            response.close()

    def _json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        with _reaching(self.url):
            response = self._http.request(method, path, **request)
        if response.status_code >= 400:
            raise _refusal(response)
        return self._parsed(response)

    def _parsed(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ServerUnreachable(f"what answers at {self.url} is not lorasrv")
        return content


class _reaching:  # noqa: N801 - used as a statement
    """Turns what the network says into ServerUnreachable."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            raise ServerUnreachable(f"no server answers at {self._url}; start one with: lorasrv serve") from None
        if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
            raise ServerUnreachable(f"{self._url} is no server address; expected http://HOST:PORT") from None
        if isinstance(error, httpx2.HTTPError):
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"the server at {self._url} stopped answering: {reason}") from None


def _refusal(response: httpx2.Response) -> Refused:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, dict):
        error = {"message": f"the server answered {response.status_code} {response.reason_phrase}"}
    retry_after = response.headers.get("retry-after", "")
    is_for_now = response.status_code in BUSY and response.headers.get("x-should-retry") != "false"
    return Refused(response.status_code, error, float(retry_after) if is_for_now and retry_after.isdecimal() else None)


def _read_chunks(path: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
            done += len(chunk)
            progress(done)
