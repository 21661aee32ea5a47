"""LiteLLM as `hosted_vllm/…`: whole, streamed, async, and which of its exceptions errors become."""

import asyncio
import os
from typing import Any

# It would fetch a list of prices from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from common import CHAT, Arguments, check, check_differ, passed, refuses_first

TOKENS = 20
litellm.telemetry = False
litellm.suppress_debug_info = True


def fields(arguments: Arguments, name: str, **more: Any) -> dict[str, Any]:
    where = {"model": f"hosted_vllm/{name}", "api_base": f"{arguments.url}/v1", "api_key": "none"}
    return {**where, "messages": CHAT, "max_tokens": TOKENS, "temperature": 0, **more}


def main(arguments: Arguments) -> None:
    texts = {}
    for name in (arguments.base, arguments.adapter):
        answer = litellm.completion(**fields(arguments, name))
        texts[name] = answer.choices[0].message.content
        check(0 < answer.usage.completion_tokens <= TOKENS)
        chunks = litellm.completion(**fields(arguments, name, stream=True, stream_options={"include_usage": True}))
        check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == texts[name])
    check_differ(texts[arguments.base], texts[arguments.adapter])
    by_field = litellm.completion(**fields(arguments, arguments.base, extra_body={"adapter_id": arguments.adapter}))
    check(by_field.choices[0].message.content == texts[arguments.adapter])
    passed("completion, whole and streamed, extra_body")

    own = litellm.text_completion(**_plain(arguments, arguments.adapter))
    base = litellm.text_completion(**_plain(arguments, arguments.base))
    check_differ(base.choices[0].text, own.choices[0].text)
    passed("text_completion")

    wrong = (
        ({"name": "nobody"}, litellm.NotFoundError),
        ({"name": arguments.adapter, "temperature": -1}, litellm.BadRequestError),
        ({"name": arguments.adapter, "max_tokens": 100_000}, litellm.BadRequestError),
    )
    for change, kind in wrong:
        for stream in (False, True):
            name = str(change["name"])
            try:
                litellm.completion(**{**fields(arguments, name, stream=stream), **_without_name(change)})
            except Exception as error:
                check(isinstance(error, kind), f"{type(error).__name__} instead of {kind.__name__}: {error}")
            else:
                check(False, f"{change} was accepted")
    with refuses_first(arguments.url, 429, {"retry-after": "0"}) as (url, seen):
        at = {"api_base": f"{url}/v1", "num_retries": 0, "max_retries": 0}
        try:
            litellm.completion(**{**fields(arguments, arguments.adapter), **at})
        except litellm.RateLimitError:
            check(len(seen) == 1)
        else:
            check(False, "429 was not raised")
    passed("errors are mapped")
    asyncio.run(asynchronous(arguments, texts))


def _plain(arguments: Arguments, name: str) -> dict[str, Any]:
    given = {key: value for key, value in fields(arguments, name).items() if key != "messages"}
    return {**given, "prompt": "Good morning"}


def _without_name(change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in change.items() if key != "name"}


async def asynchronous(arguments: Arguments, texts: dict[str, str]) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**fields(arguments, name)) for name in texts))
    check([answer.choices[0].message.content for answer in answers] == list(texts.values()))
    stream = await litellm.acompletion(**fields(arguments, arguments.adapter, stream=True))
    check("".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == texts[arguments.adapter])
    passed("async")


if __name__ == "__main__":
    main(Arguments.read())
