"""Prompts cut to their last tokens, and token ids in answers, as vLLM has them."""

from typing import Any

import pytest
from answers import events
from spelled_engine import BOS, TEMPLATE, spelled, tiny_tokenizer

from api.serving.prompts import last_tokens
from lorasrv.errors import ContextLengthExceeded
from lorasrv.text.chat_template import ChatTemplate

SAID = "Mía"
USER = {"role": "user", "content": "hello"}


@pytest.fixture(autouse=True)
def speaking(engine) -> None:
    """Every byte is a token; texts begin with one more."""
    engine.tokenizer = tiny_tokenizer()
    engine.chat_template = ChatTemplate(TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    engine.script = spelled(engine.tokenizer, SAID)
    engine.max_model_len = 64


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


CHAT_IDS = ChatTemplate(TEMPLATE).encode([USER], tiny_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "count", "kept"),
    [
        ("hello", 3, [BOS, *ids_of("lo")]),
        ("hello", 6, [BOS, *ids_of("hello")]),
        ("hello", 99, [BOS, *ids_of("hello")]),
        ("hello", 1, ids_of("o")),
        (ids_of("hello"), 3, ids_of("llo")),
        (ids_of("hello"), 99, ids_of("hello")),
        ("", 4, [BOS]),
    ],
)
def test_the_last_tokens_stay(prompt: Any, count: int, kept: list[int]) -> None:
    assert last_tokens([prompt], count, tiny_tokenizer(), 64) == [kept]


def test_a_text_of_many_contexts_is_not_tokenized() -> None:
    with pytest.raises(ContextLengthExceeded):
        last_tokens(["hi", "x" * 8 * 2000], 3, tiny_tokenizer(), 64)


class TestTruncation:
    def test_prompts_of_a_completion(self, server, engine) -> None:
        both = ["hello", "good day"]
        answer = server.complete(prompt=both, truncate_prompt_tokens=3, max_tokens=9)
        assert [added.prompt for added in engine.added] == [[BOS, *ids_of("lo")], [BOS, *ids_of("ay")]]
        assert answer.json()["usage"]["prompt_tokens"] == 6
        engine.added.clear()
        shown = server.complete(prompt=ids_of("hello"), truncate_prompt_tokens=2, echo=True).json()
        assert engine.added[0].prompt == ids_of("lo")
        assert shown["choices"][0]["text"] == f"lo{SAID}"

    def test_as_much_as_leaves_room_for_the_answer(self, server, engine) -> None:
        text = "".join(chr(97 + i % 26) for i in range(300))
        assert server.complete(prompt=text, truncate_prompt_tokens=-1, max_tokens=24).status_code == 200
        assert engine.added[0].prompt == [BOS, *ids_of(text[-39:])]
        assert server.complete(prompt="hi", truncate_prompt_tokens=-1, max_tokens=24).status_code == 200
        assert engine.added[1].prompt == [BOS, *ids_of("hi")]

    def test_a_conversation(self, server, engine) -> None:
        assert server.chat(messages=[USER], truncate_prompt_tokens=12).status_code == 200
        assert engine.added[0].prompt == CHAT_IDS[-12:]
        long = {"role": "user", "content": "x" * 200}
        assert server.chat(messages=[long], truncate_prompt_tokens=-1).status_code == 200
        assert len(engine.added[1].prompt) == 56

    def test_a_personas_prompt_is_not_cut_off(self, server, engine) -> None:
        engine.max_model_len = 4096
        server.http.post("/v1/adapters", json={"id": "muse", "defaults": {"system": "Rhyme."}}).raise_for_status()
        error = server.chat(model="muse", messages=[USER], truncate_prompt_tokens=12).json()["error"]
        assert (error["param"], engine.added) == ("truncate_prompt_tokens", [])
        assert "cut off the persona's prompt" in error["message"]

    @pytest.mark.parametrize("count", [0, -2, 65])
    def test_what_is_no_number_of_tokens(self, server, count: int) -> None:
        error = server.complete(prompt="hi", truncate_prompt_tokens=count).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"
        assert "must be between 1 and 64, or -1" in error["message"]


class TestTokenIds:
    def test_of_completions(self, server, engine) -> None:
        body = {"prompt": ["hi", "yo"], "return_token_ids": True, "n": 2}
        said = [*ids_of(SAID), 249]
        choices = server.complete(**body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [
            [BOS, *ids_of(p)] for p in ("hi", "hi", "yo", "yo")
        ]
        assert choices[0]["token_ids"] == said
        streamed = [c for chunk in events(server.complete(**body, stream=True)) for c in chunk["choices"]]
        for index, whole in enumerate(choices):
            own = [choice for choice in streamed if choice["index"] == index]
            assert [token for choice in own for token in choice["token_ids"]] == whole["token_ids"]
            assert [choice.get("prompt_token_ids") for choice in own] == [
                whole["prompt_token_ids"],
                *[None] * (len(own) - 1),
            ]
        assert all("token_ids" not in choice for choice in server.complete(prompt="hi").json()["choices"])
        # Bytes of one letter come with its text.
        assert [len(choice["token_ids"]) for choice in streamed if choice["index"] == 0][:2] == [1, 2]

    def test_of_a_chat(self, server) -> None:
        said = [*ids_of(SAID), 249]
        whole = server.chat(messages=[USER], return_token_ids=True).json()
        assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (CHAT_IDS, said)
        assert "prompt_token_ids" not in whole["choices"][0]
        chunks = events(server.chat(messages=[USER], return_token_ids=True, stream=True))
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [CHAT_IDS, *[None] * (len(chunks) - 1)]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == said

    def test_beside_an_echo(self, server) -> None:
        [choice] = server.complete(prompt="hi", echo=True, max_tokens=0, return_token_ids=True).json()["choices"]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("hi", [], [BOS, *ids_of("hi")])
