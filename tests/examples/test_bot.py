"""The example's backend against a server of a few lines: what it asks, remembers, and passes on."""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx2
import pytest

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
PERSONA = {"name": "Captain Mia", "greetings": ["Ahoy, {{user}}!"]}


class FakeServer(httpx2.AsyncBaseTransport):
    """Answers each question with its next script: pieces of text, or an error to send (a response, or an event)."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.scripts: list[Any] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.startswith("/v1/adapters/"):
            return httpx2.Response(200, json={"id": "mia", "persona": PERSONA})
        assert request.url.path == "/v1/chat/completions"
        self.asked.append(json.loads(await request.aread()))
        script = self.scripts.pop(0) if self.scripts else ["Aye, ", "aye."]
        if isinstance(script, httpx2.Response):
            return script
        return httpx2.Response(200, content=self._events(script))

    async def _events(self, script: list[Any]) -> AsyncIterator[bytes]:
        for piece in script:
            await asyncio.sleep(0)
            sent = piece if isinstance(piece, dict) else {"choices": [{"delta": {"content": piece}}]}
            yield f"data: {json.dumps(sent)}\n\n".encode()
        if not isinstance(script[-1], dict):
            yield b"data: [DONE]\n\n"


@pytest.fixture
def bot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PERSONA_BOTS))
    monkeypatch.delitem(sys.modules, "bot", raising=False)
    yield importlib.import_module("bot")
    sys.modules.pop("bot", None)


Ask = Callable[..., Coroutine[Any, Any, httpx2.Response]]


def run(bot: Any, server: FakeServer, scene: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
    """Plays a scene with the backend, whose characters are mia and a mood of hers."""

    async def main() -> None:
        upstream = httpx2.AsyncClient(base_url="http://lorasrv", transport=server)
        characters = [bot.Character("mia", "Mia", "mia"), bot.Character("sad", "Mia, sad", "0.5*mia+0.5*rain")]
        backend = bot.Backend(bot.PersonaBot(upstream, characters, bot.Memory(":memory:")))
        async with (
            upstream,
            httpx2.AsyncClient(base_url="http://bot", transport=httpx2.ASGITransport(backend.app)) as client,
        ):

            async def ask(method: str, path: str, **sent: Any) -> httpx2.Response:
                response: httpx2.Response = await client.request(method, path, **sent)
                return response

            await scene(ask)

    asyncio.run(main())


def say(ask: Ask, text: str, **body: Any) -> Coroutine[Any, Any, httpx2.Response]:
    return ask("POST", "/talk", json={"user": "Ann", "character": "mia", "text": text, **body})


def test_the_persona_greets_and_each_user_has_a_memory_of_their_own(bot) -> None:
    server = FakeServer()

    async def scene(ask: Ask) -> None:
        shown = (await ask("GET", "/characters?user=Ann")).json()
        assert [(one["name"], one["greeting"]) for one in shown] == [
            ("Captain Mia", "Ahoy, Ann!"),
            ("Mia, sad", "Ahoy, Ann!"),
        ]
        assert (await say(ask, "Rum?")).text == "Aye, aye."
        await say(ask, "More?")
        await say(ask, "Hi", user="Bo")
        await say(ask, "Hi", character="sad")
        kept = (await ask("GET", "/memory?user=Ann&character=mia")).json()
        assert [message["content"] for message in kept] == ["Rum?", "Aye, aye.", "More?", "Aye, aye."]
        assert (await ask("DELETE", "/memory?user=Ann")).status_code == 204
        assert (await ask("GET", "/memory?user=Ann&character=mia")).json() == []
        assert len((await ask("GET", "/memory?user=Bo&character=mia")).json()) == 2

    run(bot, server, scene)
    told = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.asked]
    assert told[1] == [
        ("assistant", "Ahoy, Ann!"), ("user", "Rum?"), ("assistant", "Aye, aye."), ("user", "More?"),
    ]  # fmt: skip
    assert told[2] == [("assistant", "Ahoy, Bo!"), ("user", "Hi")]
    assert [(body["model"], body["user"]) for body in server.asked[1:]] == [
        ("mia", "Ann"), ("mia", "Bo"), ("0.5*mia+0.5*rain", "Ann"),
    ]  # fmt: skip


def test_only_whole_answers_are_remembered_and_errors_keep_their_status(bot) -> None:
    server = FakeServer()
    busy = {"error": {"message": "the queue is full"}}
    server.scripts = [
        httpx2.Response(503, json=busy, headers={"retry-after": "2"}),
        httpx2.Response(500, text="?"),
        [{"error": {"message": "the engine has died"}}],
        ["half", {"error": {"message": "the engine has died"}}],
    ]

    async def scene(ask: Ask) -> None:
        refused = await say(ask, "1")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json() == {"error": "the queue is full"}
        assert (await say(ask, "2")).status_code == 500
        assert (await say(ask, "3")).status_code == 502
        # The response has begun: the connection breaks, so that no half answer is taken for a whole one.
        with pytest.raises(AssertionError):
            await say(ask, "4")
        assert (await ask("GET", "/memory?user=Ann&character=mia")).json() == []
        wrong = {"user": ("", "x" * 65, "a\nb", 5), "character": ("tom", None), "text": ("", " ", "x" * 5000, 5)}
        for field, values in wrong.items():
            for value in values:
                answer = await say(ask, **{"text": "x", field: value})
                assert (answer.status_code, answer.json()["error"].partition(":")[0]) in ((400, field), (404, field))
        assert (await ask("POST", "/talk", content=b"{}")).status_code == 415
        for content in (b"[", b"[" * 100_000, b'{"user": "Ann", "character": "mia", "text": "a\\ud800"}'):
            answer = await ask("POST", "/talk", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400

    run(bot, server, scene)
    assert len(server.asked) == 4


def test_questions_of_one_conversation_wait_for_each_other(bot) -> None:
    server = FakeServer()

    async def scene(ask: Ask) -> None:
        await asyncio.gather(*(say(ask, str(number)) for number in range(3)))

    run(bot, server, scene)
    assert [len(body["messages"]) for body in server.asked] == [2, 4, 6]
