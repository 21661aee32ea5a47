"""huggingface_hub's InferenceClient: chat, also with a schema; text_generation, whole, streamed and with details."""

import json

from common import CHAT, Arguments, check, check_differ, passed
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError, ValidationError

TOKENS = 20


def main(arguments: Arguments) -> None:
    client = InferenceClient(base_url=arguments.url, api_key="none")
    texts = {}
    for name in (arguments.base, arguments.adapter):
        answer = client.chat_completion(CHAT, model=name, max_tokens=TOKENS, temperature=0)
        texts[name] = answer.choices[0].message.content
        chunks = client.chat_completion(CHAT, model=name, max_tokens=TOKENS, temperature=0, stream=True)
        check("".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == texts[name])
    check_differ(texts[arguments.base], texts[arguments.adapter])
    passed("chat_completion, whole and streamed")

    mood = {"enum": ["good", "bad"]}
    for wanted in (
        {"type": "json_schema", "json_schema": {"name": "mood", "schema": mood}},
        {"type": "json", "value": mood},
    ):
        answer = client.chat_completion(CHAT, model=arguments.adapter, max_tokens=TOKENS, response_format=wanted)
        check(json.loads(answer.choices[0].message.content) in mood["enum"], str(wanted))
    passed("chat_completion with a schema")

    client = InferenceClient(arguments.url)
    base = client.text_generation("Good morning", max_new_tokens=TOKENS)
    own = client.text_generation("Good morning", max_new_tokens=TOKENS, adapter_id=arguments.adapter)
    check_differ(base, own)
    asked = {"max_new_tokens": TOKENS, "adapter_id": arguments.adapter}
    text = client.text_generation("Good morning", grammar={"type": "json", "value": mood}, **asked)
    check(json.loads(text) in mood["enum"], text)
    check("".join(client.text_generation("Good morning", stream=True, **asked)) == own)
    full = client.text_generation("Good morning", details=True, decoder_input_details=True, **asked)
    check(full.generated_text == own and full.details.generated_tokens == len(full.details.tokens) <= TOKENS)
    check("".join(token.text for token in full.details.tokens) == own)
    check(all(token.logprob <= 0 for token in full.details.tokens) and len(full.details.prefill) > 0)
    events = list(client.text_generation("Good morning", stream=True, details=True, **asked))
    check("".join(event.token.text for event in events) == own == events[-1].generated_text)
    check(events[-1].details.finish_reason == full.details.finish_reason)
    passed("text_generation, whole, streamed, with details")

    for wrong in ({"adapter_id": "nobody"}, {"adapter_id": arguments.adapter, "top_p": 7.0}):
        for stream in (False, True):
            try:
                list(client.text_generation("x", max_new_tokens=3, stream=stream, **wrong))
            except (HfHubHTTPError, TextGenerationError) as error:
                check(isinstance(error, ValidationError), f"{type(error).__name__}: {error}")
            else:
                check(False, f"{wrong} was accepted")
    try:
        client_of_chat = InferenceClient(base_url=arguments.url, api_key="none")
        client_of_chat.chat_completion(CHAT, model="nobody", max_tokens=3)
    except HfHubHTTPError as error:
        check(error.response.status_code == 404 and "nobody" in str(error), str(error))
    else:
        check(False, "nobody answered")
    passed("errors are typed")


if __name__ == "__main__":
    main(Arguments.read())
