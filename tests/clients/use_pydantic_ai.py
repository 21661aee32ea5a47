"""Pydantic AI, over chats and over Responses: answers, streams, typed answers, a forced tool, and its errors."""

import asyncio
from collections.abc import Callable
from typing import Any

from common import Arguments, check, check_differ, passed
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

QUESTION = "Say hello in five words."


class Pirate(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)


def told_twice() -> Callable[[Pirate], Pirate]:
    """A tool that refuses its first call, so that the next request has this call in its history."""
    tries: list[Pirate] = []

    def told(pirate: Pirate) -> Pirate:
        tries.append(pirate)
        if len(tries) == 1:
            raise ModelRetry("Try again.")
        return pirate

    return told


async def main(arguments: Arguments) -> None:
    provider = OpenAIProvider(base_url=f"{arguments.url}/v1", api_key="none")
    settings = ModelSettings(max_tokens=300, temperature=0)

    def agent(kind: Any, name: str, **more: Any) -> Agent[None, Any]:
        return Agent(kind(name, provider=provider), model_settings=settings, **more)

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        texts = [(await agent(kind, name).run(QUESTION)).output for name in (arguments.base, arguments.adapter)]
        check_differ(*texts)
        async with agent(kind, arguments.adapter).run_stream(QUESTION) as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
            check("".join(pieces) == texts[1] and len(pieces) > 1, f"{pieces} {texts}")
            check(streamed.usage.output_tokens > 5)
        typed = await agent(kind, arguments.adapter, output_type=NativeOutput(Pirate)).run(QUESTION)
        check(isinstance(typed.output, Pirate))
        passed(f"{kind.__name__}: answers, streams with usage, typed answers")

        called = await agent(kind, arguments.adapter, output_type=ToolOutput(told_twice())).run(QUESTION)
        check(isinstance(called.output, Pirate))
        parts = [part for message in called.all_messages() for part in message.parts]
        check(sum(isinstance(part, ToolCallPart) for part in parts) == 2)
        goes_on = await agent(kind, arguments.adapter).run("And you?", message_history=called.all_messages())
        check(bool(goes_on.output))
        try:
            await agent(kind, "nobody").run(QUESTION)
        except ModelHTTPError as error:
            check(error.status_code == 404, str(error))
        else:
            check(False, "nobody answered")
        passed(f"{kind.__name__}: forced calls, again with their history, and errors")


if __name__ == "__main__":
    asyncio.run(main(Arguments.read()))
