"""JSON as one line, for readers of lines: event streams, results of batches, output of commands, the log.

Text is not escaped, except three non-ASCII characters that end a line in Unicode, and therefore for `str.splitlines`
and for httpx, which most Python clients use. Escaping does not change the JSON. JSON itself escapes all characters
below U+0020.
"""

import json
import re
from typing import Any

Json = dict[str, Any]
"""A JSON object."""
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_encode_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def one_line(value: Any, **options: Any) -> str:
    """Return the JSON of a value; `options` as for `json.dumps`."""
    return _one_line(json.dumps(value, ensure_ascii=False, **options))


def compact_line(value: Any) -> str:
    """Return the JSON of a value, without blanks."""
    return _one_line(_encode_compact(value))


def _one_line(text: str) -> str:
    return text if text.isascii() else _LINE_ENDS.sub(lambda end: f"\\u{ord(end[0]):04x}", text)
