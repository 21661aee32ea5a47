"""Map each exception to an HTTP response, in OpenAI's and in TGI's format; a test checks that all classes are
mapped.

TGI's routes respond with `{"error": "...", "error_type": "..."}`. Clients of TGI and LoRAX choose their exception by
`error_type`: validation, generation, overloaded or incomplete_generation (huggingface_hub `inference/_common.py`,
lorax-client `errors.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from adapter_store import errors as store_errors
from api.problem_texts import merged, problem_text, without_other_types
from lorasrv import errors as engine_errors
from lorasrv.outputs import CLIENT

MAX_SHOWN_PROBLEMS = 3
ERROR_CODE = "lorasrv.error_code"
"""Key in the request's scope: the code of the error response, for the log line."""
ERROR_CAUSE = "lorasrv.error_cause"
"""Key in the request's scope: the error's own message, if the response has another one."""
INVALID = "invalid_request_error"
SERVER = "server_error"
INTERNAL_MESSAGE = "internal error; see the server's log for this request's x-request-id"
NO_ROUTE = "there is no such route; all are listed at /openapi.json, OpenAI's below /v1"
BROKEN_OFF = "generation_failed"
"""Error code of an answer that ended early."""
TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})
_BRANCHES = frozenset({"str", "int", "float", "bool", "constrained", "window", "select"})
"""Names of union branches in the locations that pydantic reports."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Describe the response to a class of exceptions."""

    status: int
    code: str
    type: str = INVALID
    param: str | None = None
    # False sends `x-should-retry: false`. Without it, openai-python retries every 409, 429 and 5xx twice, so a
    # permanent failure would cost three times the work.
    retry: bool = True
    retry_after_s: float | None = None
    # Whether to close the connection, because the server is about to end.
    closes: bool = False
    # Replaces the exception's own message, which may contain a path or other internals.
    message: str | None = None


# Unknown errors are bugs, which repeat on a retry, so clients are told not to retry.
_BUG = Answer(500, "internal_error", SERVER, retry=False, message=INTERNAL_MESSAGE)
ANSWERS: Mapping[type[Exception], Answer] = {
    engine_errors.LorasrvError: _BUG,
    engine_errors.InvalidRequest: Answer(400, "invalid_value"),
    engine_errors.ContextLengthExceeded: Answer(400, "context_length_exceeded"),
    engine_errors.ModelError: Answer(500, "model_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.ModelNotFound: Answer(500, "model_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.UnsupportedFormat: Answer(500, "model_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.UnsupportedModel: Answer(500, "model_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.CorruptModel: Answer(500, "model_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.ConfigError: Answer(500, "config_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.NotEnoughMemory: Answer(500, "config_error", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.InvalidTrace: Answer(500, "invalid_trace", SERVER, retry=False, message=INTERNAL_MESSAGE),
    engine_errors.AdapterLoadFailed: Answer(503, "adapter_load_failed", SERVER, retry=False),
    # Each retry would occupy a thread.
    engine_errors.AdapterLoadTimeout: Answer(503, "adapter_load_failed", SERVER, retry=False),
    engine_errors.AdapterDeleted: Answer(404, "adapter_deleted", param="model"),
    engine_errors.RetryLater: Answer(503, "server_busy", SERVER, retry_after_s=1.0),
    engine_errors.AdapterCold: Answer(503, "adapter_cold", SERVER, param="on_cold", retry_after_s=1.0),
    engine_errors.InvalidLimits: Answer(400, "invalid_value"),
    engine_errors.LimitExceeded: Answer(429, "limit_exceeded", "rate_limit_error", retry_after_s=1.0),
    # A retry would take as long again.
    engine_errors.RequestTimeout: Answer(504, "timeout", SERVER, param="timeout_s", retry=False),
    engine_errors.DeadlineUnreachable: Answer(
        503, "deadline_unreachable", SERVER, param="timeout_s", retry_after_s=1.0
    ),
    engine_errors.EngineOverloaded: Answer(429, "server_overloaded", "rate_limit_error", retry_after_s=1.0),
    engine_errors.NoReplicaReady: Answer(503, "no_replica_ready", SERVER, retry_after_s=1.0),
    engine_errors.ReplicaLost: Answer(502, "replica_lost", SERVER, retry_after_s=1.0),
    engine_errors.NoEngine: Answer(503, "no_engine", SERVER, retry=False),
    engine_errors.SnapshotFailure: Answer(503, "snapshot_failed", SERVER, retry=False),
    engine_errors.PagesDiffer: Answer(409, "pages_differ", retry=False),
    engine_errors.LeaseEnded: Answer(404, "lease_ended"),
    engine_errors.VerificationUnavailable: Answer(503, "verification_unavailable", SERVER, retry=False),
    engine_errors.VerificationBusy: Answer(429, "verification_running", "rate_limit_error", retry_after_s=30.0),
    engine_errors.VerificationFailed: Answer(503, "verification_failed", SERVER, retry=False),
    # Worth retrying, because the machine may have been the cause. The third try is refused (`poison_requests.py`).
    engine_errors.StepFailed: Answer(500, "step_failed", SERVER),
    engine_errors.OutOfMemory: Answer(503, "out_of_memory", SERVER, retry_after_s=10.0),
    engine_errors.PoisonRequest: Answer(400, "poison_request"),
    engine_errors.DeviceLost: Answer(
        503, "engine_dead", SERVER, retry_after_s=10.0, closes=True, message=INTERNAL_MESSAGE
    ),
    engine_errors.ServerStopping: Answer(503, "server_stopping", SERVER, retry_after_s=5.0, closes=True),
    engine_errors.EngineDead: Answer(503, "engine_dead", SERVER, retry_after_s=10.0, closes=True),
    store_errors.AdapterError: _BUG,
    store_errors.AdapterNotFound: Answer(404, "model_not_found", param="model"),
    store_errors.IdExpected: Answer(404, "model_not_found", param="model"),
    store_errors.VersionNotFound: Answer(404, "version_not_found", param="version"),
    store_errors.InvalidAlias: Answer(400, "invalid_alias", param="alias"),
    store_errors.AdapterChanged: Answer(412, "precondition_failed", param="If-Match"),
    store_errors.VersionInUse: Answer(409, "version_in_use", param="force", retry=False),
    store_errors.QuotaExceeded: Answer(507, "quota_exceeded", SERVER, retry=False),
    store_errors.InvalidAdapterId: Answer(400, "invalid_adapter_id", param="id"),
    store_errors.AdapterInvalid: Answer(422, "invalid_adapter"),
    store_errors.NotComposable: Answer(400, "not_composable", param="adapters"),
    store_errors.AdapterExists: Answer(409, "adapter_exists", param="id", retry=False),
    store_errors.AdapterCorrupt: Answer(503, "adapter_corrupt", SERVER, retry=False),
    store_errors.LoadCancelled: Answer(503, "adapter_load_failed", SERVER, retry=False),
    store_errors.InvalidDigest: Answer(400, "invalid_digest", param="digest"),
    store_errors.BlobNotFound: Answer(404, "blob_not_found", param="weights"),
    store_errors.BlobTooLarge: Answer(413, "blob_too_large"),
    store_errors.BlobLengthMismatch: Answer(400, "length_mismatch"),
    store_errors.DigestMismatch: Answer(400, "digest_mismatch"),
    store_errors.StoreFull: Answer(
        507,
        "store_full",
        SERVER,
        retry=False,
        message="the disk of the adapter store is full, and nothing changed; free some of it, then send this again",
    ),
    store_errors.StoreFollows: Answer(409, "store_follows", retry=False),
    # Closes the connection: the retry may reach another server, which can reach the registry.
    store_errors.OriginUnreachable: Answer(503, "registry_unreachable", SERVER, retry_after_s=5.0, closes=True),
    store_errors.OriginDenied: Answer(502, "registry_refused", SERVER, retry=False),
    store_errors.OriginRefused: Answer(502, "registry_refused", SERVER, retry=False),
    store_errors.CacheTooSmall: Answer(503, "adapter_cache_too_small", SERVER, retry=False),
    store_errors.CacheFull: Answer(503, "adapter_cache_full", SERVER, retry_after_s=5.0),
    store_errors.InvalidArchive: Answer(400, "invalid_archive"),
    store_errors.AdaptersRefused: Answer(400, "invalid_archive"),
    store_errors.StoreLocked: Answer(
        503, "store_locked", SERVER, retry_after_s=10.0, message="another server uses the adapter store"
    ),
    store_errors.StoreUnusable: Answer(
        503,
        "store_unusable",
        SERVER,
        retry=False,
        message="the adapter store cannot be used; the server's log says why",
    ),
}

_TGI_FIELDS = {"prompt": "inputs", "max_tokens": "max_new_tokens", "ignore_eos": "ignore_eos_token"}
RESPONSES_PATH = "/v1/responses"
FIELD_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"prompt": "messages"},
    RESPONSES_PATH: {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "context_overflow": "truncation",
        "reasoning_effort": "reasoning.effort",
    },
    "/generate": _TGI_FIELDS,
    "/generate_stream": _TGI_FIELDS,
    "/": _TGI_FIELDS,
}
"""By path, the body's names of the engine's fields, where they differ."""


class ApiError(HTTPException):
    """Report an error decided by the HTTP layer itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param


class ModelNotFound(ApiError):
    """Report a name of a model that does not exist."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(404, message, code="model_not_found", param=param)


@dataclass(frozen=True, slots=True)
class Failure:
    """Hold an error response: status, headers, body, and the error's code, which some bodies do not contain.

    `cause` is for the log: the error's own message, if the body has another one.
    """

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]
    code: str | None
    cause: str = ""

    def response(self) -> JSONResponse:
        """Return a response that stores code and cause in the request's scope as `ERROR_CODE` and `ERROR_CAUSE`."""
        return _ErrorResponse(self)


class _ErrorResponse(JSONResponse):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.body, failure.status, dict(failure.headers))
        self._code, self._cause = failure.code, failure.cause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ERROR_CODE], scope[ERROR_CAUSE] = self._code, self._cause
        await super().__call__(scope, receive, send)


def cause_of(error: BaseException) -> str:
    """Return the cause that metrics count for an answer ended by this error: its name; `CLIENT` for a cancellation."""
    if isinstance(error, ApiError):
        return error.code
    return engine_errors.name_of(type(error)) if isinstance(error, Exception) else CLIENT


def describe(error: Exception, *, path: str = "") -> Failure:
    """Convert any exception to an error response in OpenAI's format, with the field names of the path's bodies."""
    if isinstance(error, HTTPException):
        return _describe_http(error)
    if isinstance(error, RequestValidationError):
        return _describe_validation(error)
    if isinstance(error, engine_errors.InvalidRequest):
        error = error.renamed(FIELD_NAMES.get(path, {}))
    answer = answer_for(type(error))
    message = answer.message or str(error)
    shown = getattr(error, "param", None) or answer.param
    body = error_body(message, answer.type, shown, answer.code)
    if isinstance(error, store_errors.AdapterInvalid):
        body["error"]["details"] = [problem.to_dict() for problem in error.problems]
        body["error"]["param"] = error.problems[0].field or None
    return Failure(answer.status, body, _headers(answer, error), answer.code, str(error) if answer.message else "")


def answer_for(kind: type[BaseException]) -> Answer:
    """Return the response of the nearest mapped ancestor; unmapped exceptions are internal errors."""
    for ancestor in kind.__mro__:
        if ancestor in ANSWERS:
            return ANSWERS[ancestor]
    return _BUG


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Build OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(answer: Answer, error: Exception) -> dict[str, str]:
    seconds = getattr(error, "retry_after_s", answer.retry_after_s)
    headers = {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}
    if answer.closes:
        headers["connection"] = "close"
    return headers if answer.retry else {**headers, "x-should-retry": "false"}


_HTTP_CODES = {
    400: "invalid_value",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    411: "length_required",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def _describe_http(error: HTTPException) -> Failure:
    code, param, message = _HTTP_CODES.get(error.status_code), None, str(error.detail)
    if isinstance(error, ApiError):
        code, param = error.code, error.param
    elif error.status_code == 404:
        # The router's own message is only "Not Found".
        message = NO_ROUTE
    kind = INVALID if error.status_code < 500 else SERVER
    body = error_body(message, kind, param, code)
    return Failure(error.status_code, body, dict(error.headers or {}), code)


def _describe_validation(error: RequestValidationError) -> Failure:
    """Convert to 400 instead of FastAPI's 422, as clients of OpenAI's API expect."""
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for problem in error.errors():
        problems.setdefault(field_name(location_of(problem)), []).append(problem)
    told = without_other_types(problems)
    texts = {name: list(map(problem_text, found)) for name, found in told.items()}
    lines = [f"{name}: {merged(each)}" if name else "; ".join(each) for name, each in texts.items()]
    shown = lines[:MAX_SHOWN_PROBLEMS]
    if len(lines) > MAX_SHOWN_PROBLEMS:
        shown.append(f"and {len(lines) - MAX_SHOWN_PROBLEMS} more")
    code = "invalid_value"
    return Failure(400, error_body("; ".join(shown), INVALID, next(iter(problems)) or None, code), {}, code)


def location_of(problem: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the location of a problem. A validator of a whole object names the field in `ctx`."""
    field = problem.get("ctx", {}).get("field")
    return problem["loc"] if field is None else (*problem["loc"], field)


def field_name(location: tuple[int | str, ...]) -> str:
    """Return a field's name as the client wrote it, such as `messages[0].role`, without names of union branches."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES and not part[0].isupper():
            name += f".{part}" if name else part
    return name


def describe_at(path: str, error: Exception) -> Failure:
    """Convert any exception to the format of the path's clients."""
    return describe_tgi(error) if path in TGI_PATHS else describe(error, path=path)


def describe_tgi(error: Exception) -> Failure:
    """Convert to TGI's format: 400 becomes 422; server errors become 424.

    Errors with `Retry-After`, timeouts (504) and unknown errors (500) keep their status. Answers that ended early are
    500.
    """
    failure = describe(error, path="/generate")
    status, kind = _status_and_type(failure, error)
    body: dict[str, Any] = {"error": failure.body["error"]["message"], "error_type": kind}
    return Failure(status, body, failure.headers, failure.code, failure.cause)


def _status_and_type(failure: Failure, error: Exception) -> tuple[int, str]:
    status = failure.status
    if status == 429:
        return 429, "overloaded"
    if status < 500:
        return (422 if status == 400 else status), "validation"
    if isinstance(error, ApiError) and error.code == BROKEN_OFF:
        return 500, "incomplete_generation"
    passes = "retry-after" in failure.headers or status == 504
    # Unknown errors stay 500, because operators watch for that status.
    unforeseen = failure.body["error"]["code"] == "internal_error" and not isinstance(error, HTTPException)
    return (status if passes or unforeseen else 424), "generation"
