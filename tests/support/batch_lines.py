"""Lines of a batch's input, and readers of its results."""

import json
from collections.abc import Iterable
from typing import Any

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = PLAIN, method: str = "POST", **fields: Any) -> str:
    """Return a line for the tiny base; `fields` are those of its body."""
    given = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    body = {"model": "tiny-base", **given, **fields}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def lines(count: int, url: str = PLAIN) -> list[str]:
    """Return lines with the ids r0, r1, ..."""
    return [line(f"r{number}", url) for number in range(count)]


def results(content: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the results by custom_id, or by `line N` if a result has none; check that every line has only one."""
    found = [json.loads(one) for one in content]
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    assert len({one["id"] for one in found}) == len(found)
    named = {one["custom_id"] or f"line {one['error']['line']}": one for one in found}
    assert len(named) == len(found)
    return named


def text_of(result: dict[str, Any]) -> str:
    """Return the text of the only choice."""
    choice = result["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
