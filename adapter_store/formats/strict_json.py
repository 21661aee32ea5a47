"""Parse text as strict JSON: no NaN, no infinite numbers, no repeated keys, no lone surrogates.

`json.loads` accepts NaN and infinity, keeps the last of repeated keys, and returns texts that cannot be encoded. This
module imports little, so that commands can use it.
"""

import json
import re
import sys
from collections import Counter
from typing import Any, NoReturn

from adapter_store.errors import show

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _NotStrict(ValueError):
    """Signal a text that `json.loads` would accept."""


def loads(text: str) -> Any:
    """Parse strict JSON.

    Raises:
        json.JSONDecodeError: the text is not JSON.
        ValueError: it is JSON, but not strict; the message says why.
        RecursionError: it is nested too deeply for Python.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique_pairs, parse_constant=refuse_constant, parse_float=_finite)
    except (json.JSONDecodeError, _NotStrict):
        raise
    except ValueError:
        raise _NotStrict(f"an integer of more than {sys.get_int_max_str_digits()} digits is too large") from None
    if _SURROGATE.search(text):
        _check_text(value)
    return value


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _NotStrict("it holds a lone surrogate (\\ud800 to \\udfff), which is not text") from None


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object for `object_pairs_hook`, refusing a repeated key, of which json silently keeps the last."""
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _NotStrict(f"key {show(repeated)} appears more than once")
    return result


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinity, for `parse_constant`."""
    raise _NotStrict(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _NotStrict(f"number {text[:40]} is too large")
    return value
