"""Helpers that read answers and commands: streams, errors, and the reason of a refusal."""

import json
import re
from typing import Any

OTHER_WORDS = ("prompt", "aliases")
"""Fields whose messages describe what is wrong with a token, or with an alias, by its name."""


def events(answer: Any) -> list[dict[str, Any]]:
    """Return the parsed `data:` events of a stream; check that it ends with [DONE] and has nothing else."""
    assert answer.status_code == 200, answer.text[:500]
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def error_of(answer: Any) -> dict[str, Any]:
    """Return the error of an answer in OpenAI's shape."""
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    return error


def coded(answer: Any) -> tuple[int, str | None]:
    """Return the status of an error in OpenAI's shape, and its code."""
    return answer.status_code, error_of(answer)["code"]


def named(answer: Any) -> tuple[int, str | None]:
    """Return the status of an error in OpenAI's shape, and the field that it names."""
    return answer.status_code, error_of(answer)["param"]


def refused(answer: Any, status: int, param: str | None, *says: str) -> None:
    """Check that the answer, in its route's shape, has this status, names the field and has the words in its message.

    A trailing `*` of `param` matches any suffix: an index, or a field inside.
    """
    assert answer.status_code == status, answer.text[:500]
    body = answer.json()
    if "error_type" in body:
        assert body["error_type"] == "validation"
        message = body["error"]
        assert (param or "") in message
    else:
        error = error_of(answer)
        assert error["type"] == "invalid_request_error"
        message, named, wanted = error["message"], error["param"] or "", param or ""
        assert named.startswith(wanted[:-1]) if wanted.endswith("*") else named == wanted, error
        stem = re.split(r"[*.\[]", wanted)[0]
        assert stem in message or stem in OTHER_WORDS, error
    assert [word for word in says if word not in message] == [], message


def failed(done: Any, code: int, *says: str) -> None:
    """Check that a command ended with this code and no output, and that its error message has the words."""
    assert (done.code, done.out) == (code, ""), done.err
    assert [word for word in says if word not in done.err] == [], done.err
