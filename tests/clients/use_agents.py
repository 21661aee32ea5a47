"""OpenAI's Agents SDK, over Responses and over chats: answers, streams, typed answers, a tool, and its errors."""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import Arguments, check, check_differ, passed
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel, Field

QUESTION = "Say hello in five words."


class Pirate(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def agent(client: AsyncOpenAI, kind: type[Any], name: str, *, forces_call: bool = False, **more: Any) -> Agent[Any]:
    settings = ModelSettings(max_tokens=500, temperature=0, tool_choice="required" if forces_call else None)
    return Agent(name="persona", model=kind(model=name, openai_client=client), model_settings=settings, **more)


async def main(arguments: Arguments) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        plain = [agent(client, kind, name) for name in (arguments.base, arguments.adapter)]
        texts = [(await Runner.run(each, QUESTION)).final_output for each in plain]
        check_differ(*texts)
        streamed = Runner.run_streamed(plain[1], QUESTION)
        deltas = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
        check(streamed.final_output == texts[1] and len(deltas) > 5)
        typed = (await Runner.run(agent(client, kind, arguments.adapter, output_type=Pirate), QUESTION)).final_output
        check(isinstance(typed, Pirate))
        # The SDK forces only the first answer to call.
        called = await Runner.run(agent(client, kind, arguments.adapter, forces_call=True, tools=[weather]), QUESTION)
        outputs = [item.output for item in called.new_items if item.type == "tool_call_output_item"]
        check(bool(outputs) and set(outputs) <= {"sunny in Paris", "sunny in Rome"}, str(outputs))
        check(bool(called.final_output))
        try:
            await Runner.run(agent(client, kind, "nobody"), QUESTION)
        except NotFoundError as error:
            check("nobody" in str(error), str(error))
        else:
            check(False, "nobody answered")
        passed(f"{kind.__name__}: answers, streams, typed answers, a called tool, errors")


if __name__ == "__main__":
    asyncio.run(main(Arguments.read()))
