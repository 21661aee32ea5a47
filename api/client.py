"""Call the server from the command line: uploads, lists, streams. Torch-free, without an engine."""

import hashlib
import json
import re
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import httpx2

from adapter_store.formats.peft_dir import PeftDir, digest_file
from api.asgi.address import DEFAULT_SERVER, connection_options, is_loopback, server_address

CHUNK_BYTES = 1 << 20
# Seconds. A busy server may take long to send the first token, but connecting must be fast.
ANSWER_S, CONNECT_S = 600.0, 5.0
TIMEOUT = httpx2.Timeout(ANSWER_S, connect=CONNECT_S)
MAX_SENDS = 3
BUSY = (429, 503)
FORBIDDEN = 403
_UNKNOWN = frozenset({"model_not_found", "version_not_found"})
_MISSING = frozenset({"blob_not_found", "adapter_corrupt"})
ByteProgress = Callable[[str, int, int], None]
"""Called with the activity ("hashing" or "sending"), bytes done and total bytes."""


class ServerUnreachable(Exception):
    """Report that the server's address does not respond, or stopped responding."""


class InvalidAddress(Exception):
    """Report a text that cannot be the address of a server."""


class Refused(Exception):
    """Report an error response. `error` is the body's error object."""

    def __init__(self, status: int, error: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        super().__init__(str(error.get("message") or f"the server answered {status}"))
        self.status = status
        self.error = error
        self.retry_after_s = retry_after_s

    @property
    def problems(self) -> list[str]:
        """Return the problems of a refused adapter, one line each."""
        return [problem_line(problem) for problem in self.error.get("details") or []]


def problem_line(problem: Mapping[str, Any]) -> str:
    """Format as `where: what is wrong (code)`."""
    where = f"{problem['field']}: " if problem["field"] else ""
    return f"{where}{problem['message']} ({problem['code']})"


class Piece(NamedTuple):
    """Hold a piece of an answer."""

    text: str
    is_reasoning: bool = False


@dataclass
class Choice:
    """Hold one answer to a request."""

    text: str = ""
    # Reasoning before the text.
    reasoning: str = ""
    finish_reason: str | None = None
    # One entry per token, in the format of OpenAI's chat.
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class StreamedAnswer:
    """Iterate over the text of an answer as it arrives. `usage` and `choices` are complete when the iteration ends."""

    headers: Mapping[str, str]
    events: Iterator[Mapping[str, Any]]
    usage: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def finish_reason(self) -> str | None:
        """Return the finish reason of the last choice; None before it ends."""
        return self.choices[max(self.choices)].finish_reason if self.choices else None

    def close(self) -> None:
        """Abort the answer, so that the server stops computing it."""
        if isinstance(self.events, Generator):
            self.events.close()

    def __iter__(self) -> Iterator[str]:
        return (piece.text for piece in self.pieces() if not piece.is_reasoning)

    def pieces(self) -> Iterator[Piece]:
        """Yield text and reasoning as they arrive."""
        for payload in self.events:
            if "error" in payload:
                raise Refused(500, payload["error"])
            self.usage = payload.get("usage") or self.usage
            for entry in payload["choices"]:
                choice = self.choices.setdefault(entry.get("index", 0), Choice())
                choice.finish_reason = entry["finish_reason"] or choice.finish_reason
                choice.logprobs += _token_logprobs(entry.get("logprobs") or {})
                message = entry.get("delta") or entry.get("message") or {"content": entry.get("text")}
                if reasoning := message.get("reasoning"):
                    choice.reasoning += reasoning
                    yield Piece(reasoning, is_reasoning=True)
                if text := message.get("content"):
                    choice.text += text
                    yield Piece(text)


def _token_logprobs(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per token, from either of OpenAI's two formats."""
    if "tokens" not in entry:
        return entry.get("content") or []
    tops = entry.get("top_logprobs") or [None] * len(entry["tokens"])
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": other, "logprob": of_other} for other, of_other in (top or {}).items()],
        }
        for token, logprob, top in zip(entry["tokens"], entry["token_logprobs"], tops, strict=True)
    ]


def _path_of(reference: str, suffix: str = "") -> str:
    return f"/v1/adapters/{quote(reference, safe='')}{suffix}"


def _of(replica: str | None) -> dict[str, str]:
    return {} if replica is None else {"replica": replica}


def _comes_whole(body: Mapping[str, Any]) -> bool:
    """Return whether the request cannot be streamed: `best_of` above `n`, beam search, or `prompt_logprobs`."""
    tried, shown = body.get("best_of"), body.get("n")
    chosen = isinstance(tried, int) and tried > (shown if isinstance(shown, int) else 1)
    return chosen or bool(body.get("use_beam_search")) or body.get("prompt_logprobs") is not None


class Client:
    """Call one server. Methods return parsed JSON.

    Raises (all methods):
        ServerUnreachable, Refused.
    """

    def __init__(self, url: str = DEFAULT_SERVER, key: str | None = None, *, wait_s: float | None = None) -> None:
        """Connect to a server. `wait_s` is the timeout of a response, by default `ANSWER_S`."""
        self.url = server_address(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = TIMEOUT if wait_s is None else httpx2.Timeout(wait_s)
        options = connection_options(self.url)
        self._http = httpx2.Client(base_url=self.url, timeout=timeout, headers=headers, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Calls that other threads are making end with an error."""
        self._http.close()

    def base_name(self) -> str:
        """Return the server's name of its base."""
        return str(self._json("GET", "/v1/models", params={"limit": 1})["data"][0]["id"])

    def info(self, replica: str | None = None) -> dict[str, Any]:
        """Return the server's /info; behind an edge, a replica's."""
        return self._json("GET", "/info", params=_of(replica))

    def models(self) -> list[dict[str, Any]]:
        """Return the model cards of /v1/models, which any OpenAI-compatible server has."""
        return [card for card in self._json("GET", "/v1/models").get("data") or [] if isinstance(card, dict)]

    def get(self, path: str, **params: object) -> dict[str, Any]:
        """Return the JSON object at a path."""
        return self._json("GET", path, params=params)

    def name_of(self, reference: str) -> str:
        """Return the server's name of the base, an adapter, a version or an alias; it must exist."""
        return str(self._json("GET", f"/v1/models/{quote(reference, safe='')}")["id"])

    def adapters(self) -> list[dict[str, Any]]:
        adapters: list[dict[str, Any]] = self._json("GET", "/v1/adapters")["data"]
        return adapters

    def adapter(self, adapter_id: str) -> dict[str, Any]:
        return self._json("GET", _path_of(adapter_id))

    def stats(self, adapter_id: str) -> dict[str, Any]:
        return self._json("GET", _path_of(adapter_id, "/stats"))

    def delete(self, reference: str, *, force: bool = False, wait_s: float = 0.0) -> dict[str, Any]:
        """Delete an id or a version, and wait up to `wait_s` seconds for its running requests.

        With `force`, also delete its aliases and abort its requests.
        """
        params = {**({"force": "true"} if force else {}), **({"wait": f"{wait_s:g}"} if wait_s else {})}
        return self._json("DELETE", _path_of(reference), params=params)

    def change(self, adapter_id: str, body: Mapping[str, Any], *, etag: str | None = None) -> dict[str, Any]:
        """Change an adapter; with `etag`, only if the adapter still has this ETag."""
        headers = {} if etag is None else {"if-match": f'"{etag}"'}
        return self._json("PATCH", _path_of(adapter_id), json=dict(body), headers=headers)

    def defaults(self, reference: str) -> dict[str, Any]:
        """Return the defaults of a version, if the key may read them."""
        return self._json("GET", _path_of(reference, "/defaults"))

    def find_defaults(self, reference: str) -> dict[str, Any] | None:
        """Return the defaults of a version; None if the version does not exist or has no defaults."""
        try:
            found: dict[str, Any] | None = self.defaults(reference)["defaults"]
        except Refused as error:
            if error.error.get("code") not in _UNKNOWN:
                raise
            return None
        return found

    def set_defaults(self, reference: str, defaults: Mapping[str, Any], *, new: bool = False) -> dict[str, Any]:
        """Create a version with other defaults and the same weights.

        With `new`, an id that does not exist becomes a persona of the base.
        """
        path = _path_of(reference, "/defaults")
        try:
            return self._json("PUT", path, json=dict(defaults))
        except Refused as error:
            if not new or error.error.get("code") != "model_not_found":
                raise
        body = {"id": reference, "defaults": dict(defaults), "if_not_exists": True}
        return self._json("POST", "/v1/adapters", json=body)

    def make_snapshot(self, reference: str, replica: str | None = None) -> dict[str, Any]:
        """Store the keys and values of a persona's prompt on the server's disk; behind an edge, on a replica's."""
        return self._json("POST", _path_of(reference, ":snapshot"), params=_of(replica))

    def warm(self, reference: str, deadline_ms: int | None = None, replica: str | None = None) -> dict[str, Any]:
        """Load an adapter into the pool. Returns when it is resident, or at the deadline.

        Behind an edge without `replica`, it is the pool of the replica that the adapter's requests go to.

        None is the server's default deadline.
        """
        body = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
        timeout = httpx2.Timeout(ANSWER_S + (deadline_ms or 0) / 1000, connect=CONNECT_S)
        return self._json("POST", _path_of(reference, ":warm"), json=body, params=_of(replica), timeout=timeout)

    def verify(self, reference: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Compare an adapter with PEFT. Yields `{"progress": [what, share]}` repeatedly, and at the end the verdict."""
        path = _path_of(reference, ":verify")
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

    def pin(self, reference: str, *, pinned: bool, replica: str | None = None) -> dict[str, Any]:
        """Pin an adapter to the pool, or unpin it; behind an edge, in a replica's pool."""
        return self._json("PATCH", _path_of(reference), json={"pinned": pinned}, params=_of(replica))

    def limit(self, adapter_id: str, limits: Mapping[str, float]) -> dict[str, float]:
        """Replace the limits of an id, or remove them if there are none. Returns the new limits."""
        body = {"limits": dict(limits)}
        done: dict[str, float] = self._json("PATCH", _path_of(adapter_id), json=body)["limits"]
        return done

    def pool(self, replica: str | None = None) -> dict[str, Any]:
        """Return the memory map of the pool; behind an edge, a replica's."""
        return self._json("GET", "/v1/pool", params=_of(replica))

    def with_tokenizer(self, peft: PeftDir) -> PeftDir:
        """Return the adapter; its tokenizer is included only if it has tokens that the server's base lacks."""
        return peft.with_tokenizer(self._num_base_tokens) if peft.has_tokenizer else peft

    @cached_property
    def _num_base_tokens(self) -> int:
        """Return the number of the base's tokens; 0 if the key may only upload, so that the server checks them."""
        try:
            return int(self._json("GET", "/tokenizer_info")["vocab_size"])
        except Refused as error:
            if error.status != FORBIDDEN:
                raise
            return 0

    def upload(
        self,
        peft: PeftDir,
        adapter_id: str,
        *,
        if_not_exists: bool = False,
        alias: str | None = None,
        allow_partial: bool = False,
        stored: str | None = None,
        allow_drift: bool = False,
        defaults: Mapping[str, Any] | None = None,
        send_always: bool = True,
        progress: ByteProgress | None = None,
    ) -> dict[str, Any]:
        """Hash, send and register the weights, and move the alias to the new version. Returns the server's report.

        Args:
            stored: the storage format, "bf16" or "int8"; None: the server's default.
            allow_drift: accept int8 regardless of how much it changes the adapter.
            defaults: defaults for fields that requests leave out.
            send_always: False sends the weights only if the server has no usable copy with their digest.
        """
        tell = progress or (lambda *_: None)
        digest = digest_file(peft.weights_path, lambda done, total: tell("hashing", done, total))
        named = None if peft.tokenizer is None else f"sha256:{hashlib.sha256(peft.tokenizer).hexdigest()}"
        body = {
            "id": adapter_id,
            "config": peft.config,
            "weights": f"sha256:{digest}",
            "if_not_exists": if_not_exists,
            **({} if alias is None else {"alias": alias}),
            **({} if named is None else {"tokenizer": named}),
            **({"allow_partial": True} if allow_partial else {}),
            **({} if stored is None else {"stored": stored}),
            **({"allow_drift": True} if allow_drift else {}),
            **({"defaults": dict(defaults)} if defaults else {}),
        }
        sends = 0
        if send_always:
            self._send(peft.weights_path, digest, tell)
            sends = 1
        while True:
            if peft.tokenizer is not None and named is not None:
                # Send it on each try, because a registration consumes the uploaded tokenizer.
                self._put(peft.tokenizer, named, len(peft.tokenizer))
            try:
                return self._json("POST", "/v1/adapters", json=body)
            except Refused as error:
                # Send the weights again in two cases: they are gone, because another adapter with the same weights was
                # refused meanwhile; or the server's copy has a damaged header, which looks like an invalid adapter.
                again = _MISSING if sends else _MISSING | {"invalid_adapter"}
                if sends == MAX_SENDS or error.error.get("code") not in again:
                    raise
            self._send(peft.weights_path, digest, tell)
            sends += 1

    def _send(self, weights: Path, digest: str, tell: ByteProgress) -> None:
        length = weights.stat().st_size
        self._put(_read_chunks(weights, lambda done: tell("sending", done, length)), f"sha256:{digest}", length)

    def _put(self, content: bytes | Iterator[bytes], digest: str, length: int) -> None:
        headers = {"content-length": str(length), "content-type": "application/octet-stream"}
        self._json("PUT", f"/v1/blobs/{digest}", content=content, headers=headers)

    def metrics(self, replica: str | None = None) -> dict[str, float]:
        """Return the samples of /metrics by name, including labels.

        Behind an edge, these are the replica's, or without `replica` the edge's own.
        """
        with _reaching(self.url):
            response = self._http.get("/metrics", params=_of(replica))
        if response.status_code >= 400:
            raise _refusal(response)
        samples = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", response.text, re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def chat(self, body: Mapping[str, Any]) -> StreamedAnswer:
        """Send a chat request in OpenAI's format, without the stream fields. The answer is streamed if possible."""
        return self._ask("/v1/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> StreamedAnswer:
        """Send a request with a plain prompt in the same way."""
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
    """Convert network errors to ServerUnreachable, and a wrong address to InvalidAddress."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (refusal := _tls_error(error)) is not None:
            why = getattr(refusal, "verify_message", "") or refusal.reason
            raise ServerUnreachable(f"no TLS connection to {self._url}: {why}; {_tls_remedy(self._url)}") from None
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            raise ServerUnreachable(f"no server answers at {self._url}; {_remedy(self._url)}") from None
        if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
            raise InvalidAddress(f"{self._url} is not a server address; expected http://HOST:PORT") from None
        if isinstance(error, httpx2.HTTPError):
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(f"the server at {self._url} stopped answering: {reason}") from None


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the error of TLS that caused an error, if any."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _tls_remedy(url: str) -> str:
    """Return advice for an address whose certificate is refused, or where a server without TLS listens."""
    if is_loopback(urlsplit(url).hostname or ""):
        return "name the server itself by --server http://HOST:PORT"
    return "name its host as its certificate does (--server), and the authority's file by SSL_CERT_FILE"


def _remedy(url: str) -> str:
    """Return advice for an address where nothing listens: a server may not be started or not be ready yet."""
    address = urlsplit(url)
    if not is_loopback(address.hostname or ""):
        return "check the address (--server), and that the server is ready"
    port = "" if url == DEFAULT_SERVER else f" --port {address.port or 80}"
    return f"start one with: lorasrv serve{port} (it answers once it is ready), or name its address by --server"


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
