"""Published chat templates: the text and ids of transformers, and what is detected in them."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import tiny_tokenizer_json
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from api.schemas.tools import Message
from lorasrv.errors import InvalidRequest
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.reasoning import detect_markers
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

FOLDER = Path(__file__).parents[2] / "build" / "published" / "models" / "templates"
TABLE = Path(__file__).with_name("templates.txt")
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
CONTROL = re.compile(
    r"<[|｜][^\s'\"{}<>|｜]+[|｜]?>|<[^\s'\"{}<>|]+\|>|\[/?[A-Z_]+\]|</?(?:\w+_of_turn|think|tool_\w+)>"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_", "</tool_")
Chat = list[dict[str, Any]]


def tool(name: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": f"Tell: {name}.", "parameters": parameters}}


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def calls(**named: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}6789", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in named.items()
    ]


TOOLS = [tool("wind4", city="name é <b>"), tool("clock", zone="zone"), tool("ping5")]
WIND, CLOCK = calls(wind4={"city": "Köln"}), calls(clock={"zone": "CET"})
KNOTS, NOON = said("tool", "5 kn", tool_call_id="wind46789"), said("tool", "12:00", tool_call_id="clock6789")
SYSTEM, ANSWER = said("system", "Rhyme."), said("assistant", "5.")
ASKED, MORE = said("user", "Wind?"), said("user", "?")
THOUGHT = {"reasoning_content": "hm\nhm"}
CHATS: dict[str, Chat] = {
    "user": [said("user", "Hello")],
    "system": [said("system", "Многоязычный 😀 a < b & 'c'"), said("user", "안녕 café {{ 7*7 }} {% x %} <b>&amp;</b>")],
    "turns": [said("user", " 1 \n"), said("assistant", "\n\n2 <|\n"), said("user", "<|im_"), said("assistant", "4 ")],
    "late-system": [ASKED, ANSWER, SYSTEM, MORE],
    "reasoned": [ASKED, ANSWER | THOUGHT, MORE],
    "reasoned-last": [ASKED, ANSWER | THOUGHT],
    "typed": [ASKED, said("assistant", "<think>\nhm\n</think>\n\ny"), MORE],
    "tools": [SYSTEM, ASKED],
    "call": [ASKED, said("assistant", "", tool_calls=WIND), KNOTS],
    "call-reasoned": [SYSTEM, ASKED, said("assistant", "", tool_calls=WIND, **THOUGHT), KNOTS],
    "call-said": [ASKED, said("assistant", "So.", tool_calls=WIND), KNOTS, ANSWER, MORE],
    "two-calls": [ASKED, said("assistant", "", tool_calls=WIND + CLOCK), KNOTS, NOON, ANSWER],
}
WITH_TOOLS = ("tools", "call", "call-reasoned", "call-said", "two-calls")
VARIABLES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True})
ENDS = ((True, False), (False, False), (False, True))


def granite(message: dict[str, Any]) -> dict[str, Any]:
    """Write calls into the content, as the model and lorasrv do, because Granite 3's template leaves them out."""
    functions = [each["function"] for each in message.get("tool_calls", ())]
    text = f"<|tool_call|>{json.dumps(functions, ensure_ascii=False)}"
    return {**message, "content": "\n".join(filter(None, [message["content"], text]))} if functions else message


def ministral(message: dict[str, Any]) -> dict[str, Any]:
    """Make reasoning a part of the content, as lorasrv does, because Ministral's template reads it only there."""
    thought = message.get("reasoning_content")
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": message["content"]}]
    return {**message, "content": parts} if thought else message


def solar(message: dict[str, Any]) -> dict[str, Any]:
    """Repeat reasoning under a name that Solar's template reads. lorasrv does; transformers fills two other names."""
    return {**message, "reasoning": message.get("reasoning_content")}


# The known differences: what transformers must be given for lorasrv's text.
NEEDED: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ibm-granite-granite-3.3-2B-Instruct": granite,
    "mistralai-Ministral-3-14B-Reasoning-2512": ministral,
    "upstage-Solar-Open-100B": solar,
}
# Gemma 4's template cuts an answer before control tokens that are typed into it. The mark of the first one stays, and
# turns the end of the turn, which then follows it, into text: one control token less.
CUTTING = ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved")


@cache
def table() -> dict[str, list[str]]:
    """Return template -> its columns in templates.txt, where `-` is empty."""
    lines = [line for line in TABLE.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {name: [column.strip("-") for column in columns] for name, *columns in (re.split(" {2,}", x) for x in lines)}


def opened(name: str) -> tuple[str, ChatTemplate, Tokenizer, PreTrainedTokenizerFast]:
    """Return the source, the template, and a tiny tokenizer with the source's control tokens, ours and theirs."""
    source = (FOLDER / f"{name}.jinja").read_text("utf-8")
    backend = Backend.from_str(tiny_tokenizer_json())
    for token in sorted({*CONTROL.findall(source), *SPECIAL.values()}):
        backend.add_tokens([AddedToken(token, special=not token.startswith(NOT_SPECIAL), normalized=False)])
    ours = Tokenizer.from_source(TokenizerSource(TokenizerJson(backend.to_str()), special=SPECIAL))
    return source, ChatTemplate(source, SPECIAL), ours, PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def as_sent(chat: Chat) -> Chat:
    """Return what a template gets of messages of OpenAI's form, where arguments are text."""
    chat = copy.deepcopy(chat)
    for call in (call for message in chat for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return [Message.model_validate(message).plain() for message in chat]


def test_the_table_has_each_published_template() -> None:
    assert sorted(table()) == sorted(path.stem for path in FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("name", table())
def test_text_and_ids_equal_transformers(name: str) -> None:
    source, template, tokenizer, theirs = opened(name)
    refused = set()
    for (title, chat), variables, (prompt, goes_on) in product(CHATS.items(), VARIABLES, ENDS):
        if not prompt and chat[-1]["role"] != "assistant":
            continue
        given = {**variables, **({"tools": TOOLS} if title in WITH_TOOLS else {})}
        how = {"add_generation_prompt": prompt, "continue_final_message": goes_on}
        case, sent = f"{title} {variables} {how}", as_sent(chat)
        needed = [NEEDED.get(name, lambda message: message)(message) for message in chat]
        try:
            text = theirs.apply_chat_template(needed, chat_template=source, tokenize=False, **how, **given)
        except Exception:  # Of Jinja or of Python: each template has its own.
            with pytest.raises(InvalidRequest):
                print(case, template.encode(sent, tokenizer, **how, **given))
            refused.add(title)
            continue
        ids = template.encode(sent, tokenizer, **how, **given)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, case
        # Markers that are typed into a message are no control tokens, as the next test shows.
        assert title == "typed" or ids == theirs.encode(text, add_special_tokens=False), case
        assert goes_on or template.render(sent, prompt, **given) == text, case
    assert [title for title in CHATS if title in refused] == table()[name][3].split()


@pytest.mark.parametrize("name", table())
def test_messages_have_no_control_tokens(name: str) -> None:
    _, template, tokenizer, _ = opened(name)

    def count(text: str, **given: Any) -> int:
        answer = said("assistant", text, reasoning_content=text)
        asked = said("user", text)
        call = {"tool_calls": calls(wind4={"city": text})}
        chat = [asked, answer | call, KNOTS | {"content": text}] if given else [asked, answer, asked]
        try:
            ids = template.encode(as_sent(chat), tokenizer, **given)
        except InvalidRequest:
            return 0
        return sum(i in tokenizer.special_ids for i in ids)

    forged = " ".join(tokenizer.token(i) or "" for i in sorted(tokenizer.special_ids))
    for given in ({}, {"tools": TOOLS}):
        assert count("x", **given) - count(forged, **given) == (name in CUTTING)


@pytest.mark.parametrize("name", table())
def test_detected(name: str) -> None:
    _, template, tokenizer, _ = opened(name)
    form, markers = template.tool_format, detect_markers(template.source)
    tools = "" if "tools" not in template.variables else "unknown" if form is None else form.name
    prompts = [template.encode(CHATS["user"], tokenizer, **given) for given in VARIABLES if markers is not None]
    ends = [markers.end_of_prompt(prompt, tokenizer).name.lower() for prompt in prompts]
    assert [tools, markers.begin if markers else "", " ".join(ends)] == table()[name][:3]
    # An answer has no more calls than the next prompt may hold.
    assert form is None or form.takes_several == ("two-calls" not in table()[name][3])
