"""A small chat backend with several characters, each answered by its own LoRA adapter of one lorasrv server.

    python bot.py --url http://127.0.0.1:8000

In the terminal: /switch basho talks to another character, /quit leaves.
"""

import argparse
import asyncio
import tomllib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

PERSONAS = Path(__file__).parent / "personas.toml"


def load_characters() -> dict[str, str]:
    """Adapter id -> title, in the order of personas.toml."""
    personas = tomllib.loads(PERSONAS.read_text(encoding="utf-8"))["persona"]
    return {persona["id"]: persona["title"] for persona in personas}


class PersonaBot:
    """Answers users in character and remembers the last `max_turns` exchanges of each (user, character).

    Only finished answers are remembered: a failed or abandoned one leaves the history as it was.
    """

    def __init__(
        self, client: AsyncOpenAI, characters: Mapping[str, str], *, max_turns: int = 4, max_tokens: int = 64
    ) -> None:
        self._client = client
        self.characters = dict(characters)
        self._max_tokens = max_tokens
        self._history: defaultdict[tuple[str, str], deque[ChatCompletionMessageParam]] = defaultdict(
            lambda: deque(maxlen=2 * max_turns)
        )

    async def reply(self, user: str, character: str, text: str) -> str:
        """Return the whole answer of `character` to `user`."""
        return "".join([piece async for piece in self.stream(user, character, text)])

    async def stream(self, user: str, character: str, text: str) -> AsyncIterator[str]:
        """Yield the answer of `character` piece by piece. KeyError for an unknown character."""
        if character not in self.characters:
            raise KeyError(f"no character {character!r}; there are: {', '.join(self.characters)}")
        history = self._history[user, character]
        question: ChatCompletionMessageParam = {"role": "user", "content": text}
        pieces: list[str] = []
        async with await self._client.chat.completions.create(
            model=character,  # an adapter id is a model name; extra_body={"adapter_id": character} does the same
            messages=[*history, question],
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
        ) as chunks:
            async for chunk in chunks:
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    pieces.append(piece)
                    yield piece
        history.extend([question, {"role": "assistant", "content": "".join(pieces)}])

    def forget(self, user: str, character: str) -> None:
        """Start the conversation of `user` with `character` afresh."""
        self._history.pop((user, character), None)


async def answer(bot: PersonaBot, character: str, text: str) -> None:
    """Print one answer as it arrives; a refused request is one line and the chat goes on."""
    print(f"{bot.characters[character]}: ", end="", flush=True)
    try:
        async for piece in bot.stream("terminal", character, text):
            print(piece, end="", flush=True)
        print()
    except APIStatusError as error:
        print(f"[refused: {error.message}]")
    except APIConnectionError:
        raise SystemExit("[no lorasrv answers there: start one with `lorasrv serve`]") from None


async def chat(bot: PersonaBot) -> None:
    character = next(iter(bot.characters))
    print(f"characters: {', '.join(bot.characters)}   /switch NAME   /quit")
    while True:
        try:
            line = (await asyncio.to_thread(input, f"you -> {character}: ")).strip()
        except EOFError:
            return
        command, _, name = line.partition(" ")
        if command == "/quit":
            return
        if command == "/switch" and name in bot.characters:
            character = name
        elif command == "/switch":
            print(f"no character {name!r}; there are: {', '.join(bot.characters)}")
        elif line:
            await answer(bot, character, line)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    url = parser.parse_args().url.rstrip("/")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        await chat(PersonaBot(client, load_characters()))


if __name__ == "__main__":
    asyncio.run(main())
