"""What tests read of answers: streams, errors, and that a request was refused for its reason."""

import json
from typing import Any


def events(answer: Any) -> list[dict[str, Any]]:
    """Return the parsed `data:` events of a stream, which ends with [DONE] and holds nothing else."""
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


def refused(answer: Any, status: int, param: str | None, says: str = "") -> None:
    """Check that the answer has this status and names the field, in its own shape, and that its message says so.

    A trailing `*` of `param` allows more behind it: an index, or a field inside.
    """
    assert answer.status_code == status, answer.text[:500]
    body = answer.json()
    if "error_type" in body:
        assert body["error_type"] == "validation"
        assert (param or "") in body["error"]
        assert says in body["error"]
        return
    error = error_of(answer)
    named = error["param"] or ""
    assert named.startswith(param[:-1]) if param and param.endswith("*") else named == (param or ""), error
    if status == 400:
        assert error["type"] == "invalid_request_error"
        assert (param or "").rstrip("*").partition("[")[0].rpartition(".")[2] in error["message"], error
    assert says in error["message"], error
