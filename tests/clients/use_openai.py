"""openai-python: sync and async, whole and streamed, its typed errors and its retries."""

import asyncio
from typing import Any

import openai
from common import CHAT, Arguments, check, check_differ, passed, refuses_first

TOKENS = 24


def main(arguments: Arguments) -> None:
    with openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none") as client:
        chat(client, arguments)
        completions(client, arguments)
        responses(client, arguments)
        models(client, arguments)
        errors(client, arguments)
    retries(arguments)
    asyncio.run(asynchronous(arguments))


def fields(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": CHAT, "max_tokens": TOKENS, "temperature": 0, **more}


def chat(client: openai.OpenAI, arguments: Arguments) -> None:
    answer = {name: client.chat.completions.create(**fields(name)) for name in (arguments.base, arguments.adapter)}
    texts = {name: one.choices[0].message.content for name, one in answer.items()}
    check_differ(texts[arguments.base], texts[arguments.adapter])
    of_adapter = answer[arguments.adapter]
    check(of_adapter.model == arguments.adapter)
    check(of_adapter.usage is not None and 0 < of_adapter.usage.completion_tokens <= TOKENS)
    by_field = client.chat.completions.with_raw_response.create(
        **fields(arguments.base), extra_body={"adapter_id": arguments.adapter}
    )
    check(by_field.headers["x-adapter-id"] == arguments.adapter)
    check(by_field.parse().choices[0].message.content == texts[arguments.adapter])
    for name, text in texts.items():
        chunks = list(
            client.chat.completions.create(**fields(name), stream=True, stream_options={"include_usage": True})
        )
        check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text)
        check(chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0)
    passed("chat, whole and streamed")

    wanted = {"type": "object", "properties": {"food": {"enum": ["fish", "rum"]}}, "required": ["food"]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    formed = client.chat.completions.create(**fields(arguments.adapter), response_format=schema)
    check("food" in (formed.choices[0].message.content or ""))
    probable = client.chat.completions.create(**fields(arguments.adapter), logprobs=True, top_logprobs=2)
    content = probable.choices[0].logprobs.content
    check("".join(token.token for token in content).startswith(texts[arguments.adapter][:20]))
    check(all(len(token.top_logprobs) == 2 for token in content))
    passed("response_format, logprobs")


def completions(client: openai.OpenAI, arguments: Arguments) -> None:
    asked: dict[str, Any] = {"prompt": ["Ahoy", "Good morning"], "max_tokens": 8, "temperature": 0}
    base = client.completions.create(model=arguments.base, **asked)
    own = client.completions.create(model=arguments.adapter, **asked)
    check([choice.index for choice in own.choices] == [0, 1])
    check_differ(*("".join(choice.text for choice in one.choices) for one in (base, own)))
    texts = ["", ""]
    for chunk in client.completions.create(model=arguments.adapter, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    check(texts == [choice.text for choice in own.choices])
    passed("completions, whole and streamed")


def responses(client: openai.OpenAI, arguments: Arguments) -> None:
    asked: dict[str, Any] = {"input": CHAT[0]["content"], "max_output_tokens": TOKENS, "temperature": 0}
    own = client.responses.create(model=arguments.adapter, **asked)
    check_differ(client.responses.create(model=arguments.base, **asked).output_text, own.output_text)
    chat = client.chat.completions.create(**fields(arguments.adapter))
    check(own.output_text == chat.choices[0].message.content, "a response is the answer of a chat")
    *events, last = client.responses.create(model=arguments.adapter, **asked, stream=True)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    check("".join(texts) == last.response.output_text == own.output_text)
    passed("responses, whole and streamed")


def models(client: openai.OpenAI, arguments: Arguments) -> None:
    listed = [model.id for model in client.models.list()]
    check(listed[0] == arguments.base and arguments.adapter in listed)
    check(client.models.retrieve(arguments.adapter).owned_by == "lorasrv")
    passed("models")


def errors(client: openai.OpenAI, arguments: Arguments) -> None:
    wrong: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"model": "nobody"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"n": 99}, openai.BadRequestError, "n"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        # The built-in base's template has none.
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, openai.BadRequestError, "tools"),
    ]
    for change, kind, param in wrong:
        for stream in (False, True):
            try:
                client.chat.completions.create(**{**fields(arguments.adapter), **change}, stream=stream)
            except openai.APIStatusError as error:
                check(isinstance(error, kind), f"{type(error).__name__} instead of {kind.__name__}")
                check(error.param == param and bool(error.code), str(error))
            else:
                check(False, f"{change} was accepted")
    passed("errors are typed and name the field")


def retries(arguments: Arguments) -> None:
    """429 with Retry-After is asked again; what will fail again (400) is not."""
    with refuses_first(arguments.url, 429, {"retry-after": "0"}) as (url, seen):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            check(bool(client.chat.completions.create(**fields(arguments.adapter)).choices))
        check(len(seen) == 2, f"{len(seen)} requests")
    with refuses_first(arguments.url, 503, {"x-should-retry": "false"}) as (url, seen):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        try:
            client.chat.completions.create(**fields(arguments.adapter))
        except openai.InternalServerError:
            check(len(seen) == 1, f"{len(seen)} requests")
        else:
            check(False, "503 was not raised")
        client.close()
    passed("retries")


async def asynchronous(arguments: Arguments) -> None:
    async with openai.AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key="none") as client:

        async def streamed(name: str) -> str:
            stream = await client.chat.completions.create(**fields(name), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        names = (arguments.base, arguments.adapter) * 3
        texts = await asyncio.gather(*map(streamed, names))
        check(len(set(texts)) == 2, "six streams at once have two different texts")
        check_differ(texts[0], texts[1])
        whole = await client.chat.completions.create(**fields(arguments.adapter))
        check(whole.choices[0].message.content == texts[1])
    passed("async, six streams at once")


if __name__ == "__main__":
    main(Arguments.read())
