"""Convert character cards (versions 2 and 3, JSON or inside a PNG) to a persona's defaults.

A card is written for clients that assemble prompts. Here, it becomes the system prompt, example dialogues and greetings
of a persona. Specifications: character-card-spec-v2 (malfoyslastname) and -v3 (kwaroran).
"""

import base64
import binascii
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from api.cli.common.formatting import counted
from api.cli.common.terminal import CliError

SPECS = ("chara_card_v2", "chara_card_v3")
PNG = b"\x89PNG\r\n\x1a\n"
# The newer version first: a file may hold both.
KEYWORDS = (b"ccv3", b"chara")
_NAMES = {"char": "{{char}}", "bot": "{{char}}", "user": "{{user}}"}
_NAME = re.compile(r"\{\{\s*(char|user)\s*\}\}|<(bot|user|char)>", re.IGNORECASE)
_ORIGINAL = re.compile(r"\{\{\s*original\s*\}\}\s*", re.IGNORECASE)
_START = re.compile(r"^\s*<START>\s*$", re.IGNORECASE | re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPEAKER = re.compile(r"^\{\{(char|user)\}\}:[ \t]*", re.MULTILINE)
_ROLES = {"char": "assistant", "user": "user"}
_UNUSED = ("post_history_instructions", "group_only_greetings")


def defaults_of_card(data: bytes, *, without_book: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return a card's defaults, and notices of parts that were left out.

    Args:
        data: the file.
        without_book: leave a character book out instead of refusing the card.

    Raises:
        CliError: the file is not a card of version 2 or 3, or it has a character book.
    """
    card = _card(data)
    fields = card.get("data")
    if card.get("spec") not in SPECS or not isinstance(fields, dict):
        raise CliError(f"this is not a character card of version 2 or 3: spec must be one of {', '.join(SPECS)}")
    book = fields.get("character_book")
    entries = book.get("entries") if isinstance(book, dict) else None
    if entries is not None and not isinstance(entries, list):
        raise CliError("the card's character_book has entries that are not a list")
    if entries and not without_book:
        raise CliError(
            f"the card has a character book of {counted(len(entries), 'entry', 'entries')}, inserted by keyword; "
            "that is not possible here: put what matters into the description, or leave the book out with "
            "--without-book"
        )
    notices = [f"left out: character_book, {counted(len(entries), 'entry', 'entries')}"] if entries else []
    notices += [f"left out: {name}" for name in _UNUSED if fields.get(name)]
    examples, more = _examples(_text(fields, "mes_example"))
    found = {
        "name": _text(fields, "nickname") or _text(fields, "name"),
        "system": _system(fields),
        "examples": examples,
        "greetings": [_text(fields, "first_mes"), *_texts(fields, "alternate_greetings")],
    }
    found["greetings"] = [text for text in found["greetings"] if text]
    return {name: value for name, value in found.items() if value}, notices + more


def _card(data: bytes) -> Mapping[str, Any]:
    text = _embedded(data) if data.startswith(PNG) else data
    try:
        card = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise CliError("this is neither JSON nor a PNG with a character card") from None
    if not isinstance(card, dict):
        raise CliError("this is not a character card: a JSON object is expected")
    return card


def _embedded(data: bytes) -> bytes:
    """Return the card in a PNG's text chunks."""
    texts: dict[bytes, bytes] = {}
    for kind, content in _chunks(data):
        keyword, zero, text = content.partition(b"\0")
        if kind == b"tEXt" and zero and keyword in KEYWORDS:
            texts[keyword] = text
    for keyword in KEYWORDS:
        if keyword in texts:
            try:
                return base64.b64decode(texts[keyword], validate=True)
            except binascii.Error:
                raise CliError(f"the PNG's {keyword.decode()} chunk is not base64") from None
    raise CliError("the PNG holds no character card (a text chunk chara or ccv3)")


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(PNG)
    while at < len(data):
        if at + 12 > len(data):
            raise CliError("the PNG ends early")
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            raise CliError("the PNG ends early")
        if zlib.crc32(data[at + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise CliError("the PNG is damaged: a checksum is wrong")
        yield kind, data[at + 8 : end]
        at = end + 4


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise CliError(f"the card's {name} is not a text")
    return _plain(value or "", name)


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    values = fields.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CliError(f"the card's {name} is not a list of texts")
    return [_plain(value, name) for value in values]


def _plain(text: str, name: str) -> str:
    """Return a text with personas' placeholders in place of the card's, and without `{{original}}`.

    Raises:
        CliError: the text has half of a surrogate pair, which cannot be encoded; the error names the field.
    """
    if _SURROGATE.search(text):
        raise CliError(f"the card's {name} has half a character (a lone surrogate); export the card again")
    named = _NAME.sub(lambda match: _NAMES[(match[1] or match[2]).lower()], text.replace("\r\n", "\n"))
    return _ORIGINAL.sub("", named).strip()


def _system(fields: Mapping[str, Any]) -> str:
    parts = [_text(fields, "system_prompt") or "You are {{char}}.", _text(fields, "description")]
    for name, title in (("personality", "{{char}}'s personality"), ("scenario", "Scenario")):
        if text := _text(fields, name):
            parts.append(f"{title}: {text}")
    return "\n\n".join(part for part in parts if part)


def _examples(text: str) -> tuple[list[list[dict[str, str]]], list[str]]:
    """Return the example dialogues as whole pairs of turns, and notices of turns that were left out."""
    dialogues, notices = [], []
    for block in _START.split(text):
        turns = _turns(block)
        whole = turns[bool(turns and turns[0]["role"] == "assistant") :]
        whole = whole[: len(whole) // 2 * 2]
        if len(whole) < len(turns) or (block.strip() and not turns):
            notices.append("left out of mes_example: turns without their question or answer")
        dialogues += [whole] if whole else []
    return dialogues, list(dict.fromkeys(notices))


def _turns(block: str) -> list[dict[str, str]]:
    """Return the turns of a block; consecutive turns of one speaker are joined."""
    turns: list[dict[str, str]] = []
    marks = list(_SPEAKER.finditer(block))
    ends = [*(mark.start() for mark in marks), len(block)][1:]
    for mark, end in zip(marks, ends, strict=True):
        role, said = _ROLES[mark[1]], block[mark.end() : end].strip()
        if not said:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n{said}"
        else:
            turns.append({"role": role, "content": said})
    return turns
