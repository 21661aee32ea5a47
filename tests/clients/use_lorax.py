"""lorax-client: sync and async, whole and streamed, details, its typed errors."""

import asyncio
from typing import Any

from common import Arguments, check, check_differ, passed
from lorax import AsyncClient, Client
from lorax.errors import ValidationError

TOKENS = 20
PROMPT = "Good morning"


def main(arguments: Arguments) -> None:
    client = Client(arguments.url)
    base = client.generate(PROMPT, max_new_tokens=TOKENS)
    own = client.generate(PROMPT, adapter_id=arguments.adapter, max_new_tokens=TOKENS)
    check_differ(base.generated_text, own.generated_text)
    check(own.details.generated_tokens == len(own.details.tokens) <= TOKENS)
    check("".join(token.text for token in own.details.tokens) == own.generated_text)
    check(all(token.logprob <= 0 for token in own.details.tokens))
    passed("generate, with details")

    asked: dict[str, Any] = {"adapter_id": arguments.adapter, "max_new_tokens": TOKENS}
    events = list(client.generate_stream(PROMPT, **asked))
    check("".join(event.token.text for event in events) == own.generated_text == events[-1].generated_text)
    check(events[-1].details.generated_tokens == own.details.generated_tokens)
    passed("generate_stream")

    for wrong in ({"adapter_id": "nobody"}, {"adapter_id": arguments.adapter, "stop_sequences": [""]}):
        try:
            client.generate(PROMPT, max_new_tokens=3, **wrong)
        except ValidationError as error:
            check(any(str(value) in str(error) or name[:4] in str(error) for name, value in wrong.items()), str(error))
        else:
            check(False, f"{wrong} was accepted")
    try:
        list(client.generate_stream(PROMPT, adapter_id="nobody"))
    except ValidationError as error:
        check("nobody" in str(error), str(error))
    else:
        check(False, "nobody answered")
    passed("errors are typed")
    asyncio.run(asynchronous(arguments, base.generated_text, own.generated_text))


async def asynchronous(arguments: Arguments, base: str, own: str) -> None:
    client = AsyncClient(arguments.url)

    async def whole(adapter: str | None) -> str:
        return (await client.generate(PROMPT, adapter_id=adapter, max_new_tokens=TOKENS)).generated_text

    check(await asyncio.gather(whole(None), whole(arguments.adapter), whole(None)) == [base, own, base])
    stream = client.generate_stream(PROMPT, adapter_id=arguments.adapter, max_new_tokens=TOKENS)
    check("".join([event.token.text async for event in stream]) == own)
    try:
        await whole("nobody")
    except ValidationError as error:
        check("nobody" in str(error), str(error))
    else:
        check(False, "nobody answered")
    passed("async")


if __name__ == "__main__":
    main(Arguments.read())
