"""Errors as TGI and LoRAX word them, on the routes that are theirs: `{"error": "...", "error_type": "..."}`.

Their clients choose the exception by `error_type`: validation, generation, overloaded or incomplete_generation
(huggingface_hub `inference/_common.py`, lorax-client `errors.py`).
"""

from typing import Any

from starlette.exceptions import HTTPException

from api.errors import ApiError, Failure, describe

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})
BROKEN_OFF = "generation_failed"


def describe_at(path: str, error: Exception) -> Failure:
    """Any exception as the clients of that path understand it."""
    return describe_tgi(error) if path in TGI_PATHS else describe(error)


def describe_tgi(error: Exception) -> Failure:
    """400 becomes 422; a failure of ours 424, unless to try again later helps (503) or it was too late (504)."""
    failure = describe(error)
    status, kind = _status_and_type(failure, error)
    body: dict[str, Any] = {"error": failure.body["error"]["message"], "error_type": kind}
    return Failure(status, body, failure.headers)


def _status_and_type(failure: Failure, error: Exception) -> tuple[int, str]:
    status = failure.status
    if status == 429:
        return 429, "overloaded"
    if status < 500:
        return (422 if status == 400 else status), "validation"
    if isinstance(error, ApiError) and error.code == BROKEN_OFF:
        return 500, "incomplete_generation"
    passes = "retry-after" in failure.headers or status == 504
    # What nobody foresaw stays a 500, which operators watch for.
    unforeseen = failure.body["error"]["code"] == "internal_error" and not isinstance(error, HTTPException)
    return (status if passes or unforeseen else 424), "generation"
