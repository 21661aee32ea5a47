"""JSON as one line, where readers take lines: event streams, results of batches, output of commands, the log.

Text stays as it is, but for the three characters beyond ASCII that end a line to Unicode, and so to `str.splitlines`
and to httpx, on which most Python clients read: written as escapes they are the same JSON. Below U+0020 JSON itself
has nothing raw.
"""

import json
import re
from typing import Any

Json = dict[str, Any]
"""A JSON object."""
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_encode_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def one_line(value: Any, **options: Any) -> str:
    """Return the JSON of a value; `options` as of `json.dumps`."""
    return _one_line(json.dumps(value, ensure_ascii=False, **options))


def compact_line(value: Any) -> str:
    """Return the JSON of a value, without blanks."""
    return _one_line(_encode_compact(value))


def _one_line(text: str) -> str:
    return text if text.isascii() else _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text)
