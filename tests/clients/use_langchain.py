"""LangChain's ChatOpenAI: invoked, streamed with usage, in a batch, with extra_body, and its errors."""

from typing import Any

import openai
from common import CHAT, Arguments, check, check_differ, passed
from langchain_openai import ChatOpenAI

TOKENS = 20
QUESTION = CHAT[0]["content"]


def model(arguments: Arguments, name: str, **more: Any) -> ChatOpenAI:
    where = {"base_url": f"{arguments.url}/v1", "api_key": "none"}
    return ChatOpenAI(model=name, max_tokens=TOKENS, temperature=0, **where, **more)


def main(arguments: Arguments) -> None:
    base, own = (model(arguments, name) for name in (arguments.base, arguments.adapter))
    texts = [one.invoke(QUESTION).content for one in (base, own)]
    check_differ(*texts)
    by_field = model(arguments, arguments.base, extra_body={"adapter_id": arguments.adapter})
    check(by_field.invoke(QUESTION).content == texts[1])
    chunks = list(model(arguments, arguments.adapter, stream_usage=True).stream(QUESTION))
    check("".join(chunk.content for chunk in chunks) == texts[1])
    check(any(chunk.usage_metadata and chunk.usage_metadata["output_tokens"] > 0 for chunk in chunks))
    check([answer.content for answer in own.batch([QUESTION, QUESTION])] == [texts[1]] * 2)
    passed("invoke, stream with usage, batch, extra_body")

    for wrong, kind in (
        (model(arguments, "nobody"), openai.NotFoundError),
        (model(arguments, arguments.adapter, n=99), openai.BadRequestError),
    ):
        try:
            wrong.invoke(QUESTION)
        except openai.APIStatusError as error:
            check(isinstance(error, kind), f"{type(error).__name__}: {error}")
        else:
            check(False, "it was accepted")
    passed("errors are typed")


if __name__ == "__main__":
    main(Arguments.read())
