"""Conversations that outgrow the context: what stays, what goes, and how seldom the beginning changes."""

import json
import re
from typing import Any

import pytest
from spelled_engine import TEMPLATE, spelled, tiny_tokenizer
from tool_templates import WRITES_CALLS

from api.serving.overflow import fitted, room_for_prompt, split_turns
from lorasrv.text.chat_template import ChatTemplate

CONTEXT = 400
FIXED = [{"role": "system", "content": "s" * 20}]


def encode(messages: Any) -> list[int]:
    return list("".join(f"<{m['role'][0]}>{m['content']}" for m in messages).encode())


def turn(number: int, size: int = 10) -> list[dict[str, Any]]:
    said = f"{number:0{size}}"
    return [{"role": "user", "content": said}, {"role": "assistant", "content": said}]


def fit(turns: list[list[dict[str, Any]]], room: int = 300) -> tuple[list[int], int]:
    flat = [message for one in turns for message in one]
    return fitted([*FIXED, *flat], 1, room, CONTEXT, encode, encode)


def test_what_fits_stays_whole() -> None:
    assert fit([turn(n) for n in range(5)]) == (encode([*FIXED, *(m for n in range(5) for m in turn(n))]), 0)
    assert fitted(FIXED, 1, 300, CONTEXT, encode, encode) == (encode(FIXED), 0)


def test_the_oldest_turns_go_in_blocks() -> None:
    """The prompt's beginning changes once a block, not once a turn, and never comes back."""
    beginnings, told = [], []
    for count in range(1, 60):
        ids, dropped = fit([turn(n, 7) for n in range(count)])
        assert len(ids) <= 300
        assert bytes(ids).startswith(b"<s>" + b"s" * 20)
        assert bytes(ids).endswith(f"<a>{count - 1:07}".encode())
        beginnings.append(bytes(ids)[:40])
        told.append(dropped)
    assert told == sorted(told)
    # A block is 100 tokens, five turns of 20: they go together.
    assert set(told) == set(range(0, max(told) + 1, 5))
    assert len(set(beginnings)) == len(set(told)) < 12


def without_thoughts(messages: Any) -> list[int]:
    """As templates of thinking models: thoughts of earlier turns are not in the prompt."""
    last = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=0)
    return encode(
        [m if n > last else m | {"content": re.sub("<t>.*</t>", "", m["content"])} for n, m in enumerate(messages)]
    )


def test_what_the_template_leaves_out_does_not_count() -> None:
    def thought(number: int) -> list[dict[str, Any]]:
        asked, said = turn(number, 7)
        return [asked, said | {"content": f"<t>{'hm ' * 60}</t>{said['content']}"}]

    told = []
    for count in range(1, 60):
        plain = [*FIXED, *(m for n in range(count) for m in turn(n, 7)), turn(count, 7)[0]]
        told.append([])
        for turns in (plain, [*FIXED, *(m for n in range(count) for m in thought(n)), plain[-1]]):
            told[-1].append(fitted(turns, 1, 300, CONTEXT, without_thoughts, without_thoughts))
    assert [thoughtful == silent for silent, thoughtful in told] == [True] * 59
    assert {silent[1] for silent, _ in told} == set(range(0, 51, 5))


def test_one_block_more_goes_if_a_turn_alone_takes_more_than_among_others() -> None:
    def padded(messages: Any) -> list[int]:
        return encode(messages) + list(b"....." * (len(messages) == 3))

    turns = [m for n in range(13) for m in turn(n, 7)]
    # Four turns of 20 tokens, measured as 25, are the first block: 5 too few.
    ids, dropped = fitted(turns, 0, 175, CONTEXT, padded, padded)
    assert (dropped, len(ids)) == (8, 100)


def test_the_last_turn_stays_even_if_it_does_not_fit() -> None:
    ids, dropped = fit([turn(1), turn(2, 500)])
    assert dropped == 1
    assert len(ids) > CONTEXT


def test_a_context_smaller_than_its_blocks() -> None:
    ids, dropped = fitted([*turn(1), *turn(2)], 0, 2, 3, encode, encode)
    assert (ids, dropped) == (encode(turn(2)), 1)


@pytest.mark.parametrize(
    ("roles", "turns"),
    [("uaua", 2), ("aua", 2), ("uu", 2), ("uat", 1), ("", 0), ("usa", 1)],
)
def test_turns_begin_with_the_user(roles: str, turns: int) -> None:
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    found = split_turns([{"role": names[role], "content": str(i)} for i, role in enumerate(roles)])
    assert len(found) == turns
    assert "".join(m["content"] for one in found for m in one) == "".join(map(str, range(len(roles))))


def test_room_is_left_for_the_answer() -> None:
    assert room_for_prompt(2048, 100) == 1948
    assert room_for_prompt(2048, None) == 1792


class TestServed:
    @pytest.fixture(autouse=True)
    def speaking(self, engine) -> None:
        engine.tokenizer = tiny_tokenizer()
        engine.chat_template = ChatTemplate(TEMPLATE)
        engine.script = spelled(engine.tokenizer, "Mia")

    def said(self, engine: Any) -> str:
        return bytes(token + 8 for token in engine.added[-1].prompt if token < 248).decode()

    def test_a_request_asks_for_it_and_is_told(self, server, engine) -> None:
        talk = [m for n in range(40) for m in turn(n)][:-1]
        long = {"messages": [{"role": "system", "content": "Stay."}, *talk], "max_tokens": 8}
        refused = server.chat(**long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert server.chat(**long, context_overflow="error").status_code == 400
        done = server.chat(**long, context_overflow="drop_oldest")
        told = done.json()["usage"]["lorasrv"]["dropped_turns"]
        assert told > 10
        assert self.said(engine).startswith(f"system:Stay.user:{told:010}assistant:")
        assert len(engine.added[-1].prompt) <= 512 - 8
        assert server.chat(context_overflow="drop_oldest").json()["usage"]["lorasrv"]["dropped_turns"] == 0
        assert "dropped_turns" not in server.chat().json()["usage"]["lorasrv"]

    def test_a_personas_texts_stay(self, server, engine) -> None:
        examples = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]]
        stored = {"system": "Stay.", "examples": examples, "context_overflow": "drop_oldest"}
        server.http.post("/v1/adapters", json={"id": "muse", "defaults": stored}).raise_for_status()
        talk = [m for n in range(40) for m in turn(n)][:-1]
        done = server.chat(model="muse", messages=talk).json()["usage"]["lorasrv"]
        assert "context_overflow" in done["persona"]["applied"]
        assert self.said(engine).startswith(f"system:Stay.user:Hiassistant:Houser:{done['dropped_turns']:010}")
        assert server.chat(model="muse", messages=talk, context_overflow="error").status_code == 400

    def test_calls_that_only_the_template_with_tools_writes(self, server, engine) -> None:
        engine.chat_template = ChatTemplate(TEMPLATE, tool_template="{{ tools }}" + TEMPLATE + WRITES_CALLS)
        tools = [{"type": "function", "function": {"name": "f"}}]

        def called(number: int) -> list[dict[str, Any]]:
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": ""})}}
            asked, answered = turn(number)
            result = {"role": "tool", "content": "y", "tool_call_id": "1"}
            return [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result, answered]

        talk = [m for n in range(8) for m in called(n)][:-1]
        done = server.chat(messages=talk, tools=tools, context_overflow="drop_oldest", max_tokens=8).json()
        assert done["usage"]["lorasrv"]["dropped_turns"] == 5, "what is left has room"

    def test_what_no_dropping_helps(self, server) -> None:
        for content in ("x" * 600, "x" * 20_000):
            refused = server.chat(content, context_overflow="drop_oldest")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
