"""A chat backend over HTTP with several characters: personas of one lorasrv server, and moods mixed of them.

    lorasrv serve
    python bot.py                       # http://127.0.0.1:8080: a page to talk to all of them at once

It uploads the personas of personas.toml (weights, and `defaults` with names, greetings and sampling), remembers each
user's conversations in a file, and streams answers. It needs what lorasrv itself needs, and nothing else.

    GET    /characters?user=ann           id, name and greeting of each character
    POST   /talk                          {"user", "character", "text"}: the answer as text, piece by piece
    GET    /memory?user=ann&character=mia the messages so far
    DELETE /memory?user=ann               forget them all

Whoever sends a user's name is that user: put your login in front, and let `user` be what it says.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import socket
import sqlite3
import sys
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

HERE = Path(__file__).parent
MAX_TURNS = 200
"""Of a conversation; the server drops those that do not fit its context (`context_overflow` of the personas)."""
MAX_TEXT_CHARS, MAX_USER_CHARS = 4000, 64
SURROGATE = re.compile("[\\ud800-\\udfff]")
"""Half a character, which JSON can spell and no file can hold."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY, user TEXT, character TEXT, role TEXT, content TEXT);
CREATE INDEX IF NOT EXISTS conversations ON messages (user, character);
"""
Message = dict[str, str]


class Refused(Exception):
    """What the caller is told: a status and one line."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True)
class Character:
    """Whom users talk to: `model` is what lorasrv is asked for, an id or a sum of some (`mia+0.5*style`)."""

    id: str
    title: str
    model: str

    @property
    def persona(self) -> str:
        """The id whose defaults it has: of a sum, the first."""
        return self.model.partition("+")[0].rpartition("*")[2]


class Memory:
    """Conversations of each user with each character, in an SQLite file."""

    def __init__(self, file: Path | str) -> None:
        self._db = sqlite3.connect(file, isolation_level=None)
        self._db.executescript(SCHEMA)

    def messages(self, user: str, character: str) -> list[Message]:
        """The last turns, oldest first."""
        query = "SELECT role, content FROM messages WHERE user = ? AND character = ? ORDER BY number DESC LIMIT ?"
        rows = self._db.execute(query, (user, character, 2 * MAX_TURNS)).fetchall()
        return [{"role": role, "content": content} for role, content in reversed(rows)]

    def add(self, user: str, character: str, asked: str, said: str) -> None:
        """Add a turn, whole or not at all."""
        rows = [(user, character, "user", asked), (user, character, "assistant", said)]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO messages (user, character, role, content) VALUES (?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")

    def forget(self, user: str) -> None:
        self._db.execute("DELETE FROM messages WHERE user = ?", (user,))


class PersonaBot:
    """Answers users in character, and remembers finished answers; one at a time in each conversation.

    Everything about a character is the persona's, at the server: prompt, greeting, sampling. Here is only who talks
    to whom, and what was said.
    """

    def __init__(self, server: httpx2.AsyncClient, characters: list[Character], memory: Memory) -> None:
        self._server = server
        self.characters = {character.id: character for character in characters}
        self.memory = memory
        self._locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()

    async def greeting(self, user: str, character: Character) -> tuple[str, str]:
        """A character's name, and what it says first."""
        answer = await self._server.get(f"/v1/adapters/{character.persona}")
        persona = _checked(answer, answer.text).get("persona") or {}
        name = persona.get("name", character.title) if character.model == character.id else character.title
        greetings = persona.get("greetings") or ["..."]
        return name, greetings[0].replace("{{user}}", user)

    async def talk(self, user: str, character: Character, text: str) -> AsyncGenerator[str]:
        """Yield the answer piece by piece; remember it when it is whole.

        Raises:
            Refused: the server has refused the question, or failed in the middle of its answer.
        """
        async with self._locks.setdefault((user, character.id), asyncio.Lock()):
            _, first = await self.greeting(user, character)
            told = [{"role": "assistant", "content": first}, *self.memory.messages(user, character.id)]
            body = {
                "model": character.model,
                # The user's name, for the persona's texts; and it hears one version of a canary.
                "user": user,
                "messages": [*told, {"role": "user", "content": text}],
                "stream": True,
            }
            said = []
            async with self._server.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    _checked(answer, (await answer.aread()).decode())
                async for piece in _pieces(answer):
                    said.append(piece)
                    yield piece
            self.memory.add(user, character.id, text, "".join(said))


async def _pieces(answer: httpx2.Response) -> AsyncIterator[str]:
    is_whole = False
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            is_whole = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Refused(502, event["error"]["message"])
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece
    if not is_whole:
        raise Refused(502, "the answer broke off")


def _checked(answer: httpx2.Response, text: str) -> dict[str, Any]:
    """The server's JSON. Raises Refused for an error, with its Retry-After."""
    if answer.status_code < 400:
        found: dict[str, Any] = json.loads(text)
        return found
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    kept = {name: answer.headers[name] for name in ("retry-after",) if name in answer.headers}
    raise Refused(answer.status_code, text, kept)


# Over HTTP ---------------------------------------------------------------------------------------------------------
class Backend:
    """The routes."""

    def __init__(self, bot: PersonaBot) -> None:
        self._bot = bot
        routes = [
            Route("/", self.page),
            Route("/characters", self.characters),
            Route("/talk", self.talk, methods=["POST"]),
            Route("/memory", self.memory, methods=["GET", "DELETE"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={Refused: _refusal, httpx2.TransportError: _no_server})

    async def page(self, _: Request) -> Response:
        return FileResponse(HERE / "page.html")

    async def characters(self, request: Request) -> Response:
        user, bot = _user(request.query_params.get("user", "")), self._bot
        found = await asyncio.gather(*(bot.greeting(user, character) for character in bot.characters.values()))
        shown = zip(bot.characters, found, strict=True)
        return JSONResponse([{"id": id_, "name": name, "greeting": first} for id_, (name, first) in shown])

    async def talk(self, request: Request) -> Response:
        # A browser asks first before it sends JSON to another site: no page but this one can talk for its user.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise Refused(415, "send application/json")
        try:
            body = dict(await request.json())
        except (ValueError, TypeError, RecursionError):
            raise Refused(400, "the body must be a JSON object") from None
        text = body.get("text")
        if not isinstance(text, str) or not 0 < len(text.strip()) <= MAX_TEXT_CHARS or SURROGATE.search(text):
            raise Refused(400, f"text: 1 to {MAX_TEXT_CHARS} characters")
        answer = self._bot.talk(_user(body.get("user")), self._character(body.get("character")), text.strip())
        # Until the first piece, an error has a status of its own.
        first = await anext(answer, "")
        return AnswerResponse(_after(first, answer), media_type="text/plain; charset=utf-8")

    async def memory(self, request: Request) -> Response:
        user = _user(request.query_params.get("user", ""))
        if request.method == "DELETE":
            self._bot.memory.forget(user)
            return Response(status_code=204)
        character = self._character(request.query_params.get("character"))
        return JSONResponse(self._bot.memory.messages(user, character.id))

    def _character(self, name: object) -> Character:
        if not isinstance(name, str) or name not in self._bot.characters:
            raise Refused(404, f"character: there are {', '.join(self._bot.characters)}")
        return self._bot.characters[name]


class AnswerResponse(StreamingResponse):
    """An answer that may break off: then the connection ends before it is complete, so that its reader knows."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except (Refused, httpx2.TransportError) as error:
            print(f"an answer broke off: {error}", file=sys.stderr, flush=True)


def _user(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_USER_CHARS or not name.isprintable():
        raise Refused(400, f"user: 1 to {MAX_USER_CHARS} printable characters")
    return name


async def _after(first: str, rest: AsyncGenerator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(rest):
        yield first
        async for piece in rest:
            yield piece


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _no_server(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"lorasrv does not answer: {error}"}, 502)


# Start -------------------------------------------------------------------------------------------------------------
def load_characters() -> list[Character]:
    """Those of personas.toml: personas, and moods mixed of them."""
    listed = tomllib.loads((HERE / "personas.toml").read_text("utf-8"))
    personas = [Character(one["id"], one["title"], one["id"]) for one in listed["persona"]]
    return personas + [Character(one["id"], one["title"], one["model"]) for one in listed.get("mood", ())]


def upload(server: httpx2.Client) -> None:
    """Upload every persona. What the server has already stays the version that it is.

    Raises:
        Refused: the server does not take one.
    """
    for persona in tomllib.loads((HERE / "personas.toml").read_text("utf-8"))["persona"]:
        folder = HERE / persona["adapter"]
        weights = (folder / "adapter_model.safetensors").read_bytes()
        digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
        answer = server.put(f"/v1/blobs/{digest}", content=weights)
        _checked(answer, answer.text)
        body = {
            "id": persona["id"],
            "config": json.loads((folder / "adapter_config.json").read_text("utf-8")),
            "weights": digest,
            "defaults": json.loads((HERE / persona["defaults"]).read_text("utf-8")),
        }
        answer = server.post("/v1/adapters", json=body)
        done = _checked(answer, answer.text)
        print(f"{done['id']}@{done['version']} {'uploaded' if done['created'] else 'is there'}", flush=True)


async def serve(url: str, headers: Mapping[str, str], memory: Memory, listener: socket.socket) -> None:
    # No limit for reading: an answer may wait its turn. Leaving ends the request at the server, too.
    timeout = httpx2.Timeout(10, read=None)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout) as server:
        bot = PersonaBot(server, load_characters(), memory)
        host, port = listener.getsockname()[:2]
        print(f"talk at http://{host}:{port}", flush=True)
        config = uvicorn.Config(Backend(bot).app, log_level="warning", timeout_graceful_shutdown=5)
        await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of lorasrv (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="to listen on, 0: any (default: %(default)s)")
    parser.add_argument("--memory", default="memory.db", help="file of the conversations (default: %(default)s)")
    options = parser.parse_args()
    key = os.environ.get("LORASRV_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        memory = Memory(options.memory)
    except sqlite3.Error as error:
        raise SystemExit(f"--memory {options.memory}: {error}") from None
    try:
        listener = socket.create_server((options.host, options.port))
    except (OSError, OverflowError) as error:
        raise SystemExit(f"cannot listen on {options.host}:{options.port}: {error}") from None
    try:
        with httpx2.Client(base_url=options.url, headers=headers, timeout=60) as server:
            upload(server)
    except (Refused, httpx2.TransportError) as error:
        raise SystemExit(f"{options.url}: {error}. Is `lorasrv serve` running there?") from None
    except (httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise SystemExit(f"--url or LORASRV_API_KEY cannot be sent: {error}") from None
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.url, headers, memory, listener))


if __name__ == "__main__":
    main()
