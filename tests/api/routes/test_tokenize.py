"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them and lm-eval's remote tokenizer uses them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from answers import coded, error_of, named
from spelled_engine import BOS, END_OF_TURN, EOS, TEMPLATE, tiny_tokenizer

from api.serving.services import LONG_CHARS
from lorasrv.errors import InvalidRequest
from lorasrv.text.chat_template import ChatTemplate

LONG = "x" * (LONG_CHARS + 1)
LONG_TALK = [{"role": "assistant", "content": "x" * (LONG_CHARS // 8 + 1)}] * 8


@pytest.fixture(autouse=True)
def speaking(engine: Any) -> None:
    engine.tokenizer = tiny_tokenizer()
    engine.chat_template = ChatTemplate(TEMPLATE, {"eos_token": "</s>"})


def post(server: Any, path: str, **body: Any) -> Any:
    return server.http.post(path, json=body)


class TestTokenize:
    def test_prompt(self, server, engine) -> None:
        body = post(server, "/tokenize", prompt="hé</s>", return_token_strs=True).json()
        assert body["tokens"] == engine.tokenizer.encode("hé</s>")
        assert (body["tokens"][0], body["tokens"][-1]) == (BOS, EOS)
        assert (body["count"], body["max_model_len"]) == (5, 512)
        assert body["token_strs"] == ["<s>", "h", "Ã", "©", "</s>"]
        body = post(server, "/tokenize", prompt="h", add_special_tokens=False, model="tiny-base").json()
        assert (body["count"], body["token_strs"]) == (1, None)

    @pytest.mark.parametrize(
        ("path", "long"),
        [
            ("/tokenize", {"prompt": LONG}),
            ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
            ("/v1/completions", {"prompt": [LONG, "a"], "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": LONG}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 40 + [*LONG_TALK]}),
            ("/generate", {"inputs": LONG}),
        ],
    )
    def test_long_texts_take_turns(self, server, engine, path: str, long: dict[str, Any]) -> None:
        """Each may take a minute, and threads are few; short ones do not wait for them."""
        running, most, hold = [], [0], threading.Event()

        def encode(told: Any, *_: Any, **__: Any) -> list[int]:
            if len(str(told)) > LONG_CHARS:
                running.append(1)
                most.append(len(running))
                hold.wait(20)
                running.pop()
                raise InvalidRequest("done", param="x")
            return [1]

        engine.tokenizer = SimpleNamespace(encode=encode, encode_with_offsets=encode, least_tokens=lambda _: 0)
        engine.tokenizer.decoding = tiny_tokenizer().decoding
        engine.chat_template = SimpleNamespace(encode=encode, checked_variables=dict, variables=(), source="")
        ask = {"model": "tiny-base", **long}
        with ThreadPoolExecutor(60) as clients:
            asked = [clients.submit(post, server, path, **ask) for _ in range(50)]
            assert post(server, "/tokenize", prompt="x").json()["tokens"] == [1]
            hold.set()
            assert {one.result().status_code for one in asked} == {422 if path == "/generate" else 400}
        assert (len(most), max(most)) == (51, 1)

    @pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
    def test_a_chat_that_is_too_long_is_not_tokenized(self, server, engine, role: str) -> None:
        encoded: list[int] = []
        speaks = engine.tokenizer.encode
        engine.tokenizer.encode = lambda text, **how: encoded.append(len(text)) or speaks(text, **how)
        told = [{"role": role, "content": "x" * 5000}, {"role": "user", "content": "hi"}]
        refused = post(server, "/v1/chat/completions", model="tiny-base", messages=told)
        assert (coded(refused), named(refused)) == ((400, "context_length_exceeded"), (400, "messages"))
        assert ("has at least" in error_of(refused)["message"], encoded) == (True, [])
        # What the template leaves out is not in the way.
        engine.chat_template = ChatTemplate("{{ messages[1].content }}")
        assert post(server, "/v1/chat/completions", model="tiny-base", messages=told).status_code == 200

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {"prompt": "x" * 5000}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
            ("/generate", {"inputs": "x" * 5000, "parameters": {"truncate": 2}}, None),
        ],
    )
    def test_no_text_is_tokenized_that_its_length_puts_beyond_the_context(
        self, server, engine, monkeypatch, path: str, body: dict[str, Any], param: str | None
    ) -> None:
        encoded: list[int] = []
        monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: encoded.append(len(text)))
        answer = post(server, path, **body)
        assert "has at least" in answer.text
        assert encoded == []
        assert param is None or answer.json()["error"]["param"] == param

    def test_messages_that_the_template_would_leave_out(self, server) -> None:
        """As a chat is refused: the ids would be those of another conversation."""
        call = {"function": {"name": "f", "arguments": "{}"}}
        for told, param in (
            ({"role": "tool", "content": "x"}, "messages[0].role"),
            ({"role": "assistant", "tool_calls": [call]}, "messages[0].tool_calls"),
        ):
            assert named(post(server, "/tokenize", messages=[told])) == (400, param)

    def test_messages(self, server, engine) -> None:
        messages = [{"role": "user", "content": "a<turn>"}]
        tokens = post(server, "/tokenize", messages=messages).json()["tokens"]
        assert (tokens[0], tokens.count(END_OF_TURN)) == (BOS, 1)
        # As a request for an answer has them.
        server.chat("a<turn>")
        assert engine.added[-1].prompt == tokens
        assert post(server, "/tokenize", messages=messages, add_generation_prompt=False).status_code == 200
        engine.chat_template = None
        assert named(post(server, "/tokenize", messages=messages)) == (400, "messages")

    def test_an_adapters_are_the_bases(self, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        assert post(server, "/tokenize", prompt="h", model="mia").json()["count"] == 2
        assert coded(post(server, "/tokenize", prompt="h", model="tom")) == (404, "model_not_found")


class TestDetokenize:
    @pytest.mark.parametrize("text", ["Hello wörld €", "<s>a</s>", "", "\u00e9\n\t"])
    def test_and_back(self, server, text) -> None:
        tokens = post(server, "/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
        assert post(server, "/detokenize", tokens=tokens).json() == {"prompt": text}

    def test_no_more_than_the_context_holds(self, server) -> None:
        """A number of three digits may stand for eighty characters."""
        assert post(server, "/detokenize", tokens=[5] * 512).status_code == 200
        refused = post(server, "/detokenize", tokens=[5] * 513)
        assert named(refused) == (400, "tokens")
        assert "holds 512 tokens, but these are 513" in error_of(refused)["message"]


def test_tokenizer_info(server, engine) -> None:
    """What lm-eval reads: names of special tokens that /tokenize turns into one id, and the template's source."""
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert (info["bos_token_id"], info["eos_token_ids"], info["vocab_size"]) == (BOS, [EOS], 251)
    assert info["chat_template"] == TEMPLATE
    eos = post(server, "/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert eos == [EOS]
    engine.chat_template = None
    assert server.http.get("/tokenizer_info").json()["chat_template"] is None
