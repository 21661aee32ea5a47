"""Define the scope that each route needs, by method and path, and which requests count against a key's rate limit.

Routes that are missing from the table need `admin`.
"""

import re
from collections.abc import Mapping

from starlette.routing import compile_path

from api.auth.principal import Scope
from api.console.paths import CONSOLE_PATHS

INFER = frozenset({Scope.INFER})
UPLOAD = frozenset({Scope.UPLOAD})
METRICS = frozenset({Scope.METRICS})
ADMIN = frozenset({Scope.ADMIN})
REPLICATE = frozenset({Scope.REPLICATE})
EITHER = INFER | UPLOAD
OPEN_PATHS = frozenset({"/", "/health", "/ready", *CONSOLE_PATHS})
"""Need no key. The console's files contain no data: the page requests data with the key that the user enters."""
NEEDS: Mapping[tuple[str, str], frozenset[Scope]] = {
    ("POST", "/v1/chat/completions"): INFER,
    ("POST", "/v1/completions"): INFER,
    ("POST", "/v1/responses"): INFER,
    ("POST", "/generate"): INFER,
    ("POST", "/generate_stream"): INFER,
    ("POST", "/"): INFER,
    ("POST", "/tokenize"): INFER,
    ("POST", "/detokenize"): INFER,
    ("GET", "/tokenizer_info"): INFER,
    ("POST", "/v1/files"): INFER,
    ("GET", "/v1/files"): INFER,
    ("GET", "/v1/files/{file_id}"): INFER,
    ("GET", "/v1/files/{file_id}/content"): INFER,
    ("DELETE", "/v1/files/{file_id}"): INFER,
    ("POST", "/v1/batches"): INFER,
    ("GET", "/v1/batches"): INFER,
    ("GET", "/v1/batches/{batch_id}"): INFER,
    ("POST", "/v1/batches/{batch_id}/cancel"): INFER,
    ("POST", "/v1/adapters/{reference}:warm"): INFER,
    ("GET", "/v1/embeddings"): INFER,
    ("POST", "/v1/embeddings"): INFER,
    ("GET", "/v1/messages"): INFER,
    ("POST", "/v1/messages"): INFER,
    ("PUT", "/v1/blobs/sha256:{digest}"): UPLOAD,
    ("POST", "/v1/adapters"): UPLOAD,
    ("PATCH", "/v1/adapters/{reference}"): UPLOAD,
    ("DELETE", "/v1/adapters/{reference}"): UPLOAD,
    ("PUT", "/v1/adapters/{reference}/defaults"): UPLOAD,
    ("POST", "/v1/adapters/{reference}:verify"): UPLOAD,
    ("POST", "/v1/adapters/{reference}:snapshot"): UPLOAD,
    ("POST", "/v1/load_lora_adapter"): UPLOAD,
    ("POST", "/v1/unload_lora_adapter"): UPLOAD,
    ("GET", "/v1/models"): EITHER,
    ("GET", "/v1/models/{name:path}"): EITHER,
    ("GET", "/v1/adapters"): EITHER,
    ("GET", "/v1/adapters/{adapter_id}"): EITHER,
    ("GET", "/v1/adapters/{adapter_id}/stats"): EITHER,
    ("GET", "/v1/adapters/{reference}/defaults"): EITHER,
    ("GET", "/info"): EITHER | METRICS,
    ("GET", "/version"): EITHER,
    ("GET", "/ping"): EITHER,
    ("GET", "/openapi.json"): EITHER,
    ("GET", "/v1/registry/changes"): REPLICATE,
    ("GET", "/v1/registry/blobs/{digest}"): REPLICATE,
    ("POST", "/v1/registry/lease"): REPLICATE,
    ("POST", "/v1/registry/usage"): REPLICATE,
    ("GET", "/metrics"): METRICS,
    ("GET", "/v1/pool"): METRICS,
    ("GET", "/v1/replica"): REPLICATE,
    ("POST", "/v1/pages/offer"): REPLICATE,
    ("GET", "/v1/pages/{lease}"): REPLICATE,
}
"""Any of these scopes is sufficient. So is `admin`, except where `replicate` is needed."""
FURTHER_NEEDS: Mapping[tuple[str, str], str] = {("PATCH", "/v1/adapters/{reference}"): "pins and limits: admin"}
"""Actions of a route that need a further scope, which the route checks itself."""
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Methods that change or compute something: each request counts against its key's rate limit."""
GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/generate_stream", "/"}
)
"""Exceptions to `CHANGING`: these count one request per prompt, after validation."""
_CANCEL = re.compile(r"/v1/batches/[^/]+/cancel")
"""Cancelling a batch must work even when its key's rate limit is used up."""


def is_counted(method: str, path: str) -> bool:
    """Return whether the request itself counts against its key's rate limit."""
    return method in CHANGING and path not in GENERATING and _CANCEL.fullmatch(path) is None


def _compiled() -> tuple[Mapping[tuple[str, str], frozenset[Scope]], tuple[tuple[str, re.Pattern[str], str], ...]]:
    plain = {(method, path): needs for (method, path), needs in NEEDS.items() if "{" not in path}
    return plain, tuple((method, compile_path(path)[0], path) for method, path in NEEDS if "{" in path)


_PLAIN, _PATTERNS = _compiled()


def needs_no_key(method: str, path: str) -> bool:
    """Return whether the route is open to all clients: health, readiness, and the console."""
    return method in ("GET", "HEAD") and path in OPEN_PATHS


def needed(method: str, path: str) -> frozenset[Scope] | None:
    """Return the scopes of a route; None if it is missing from the table. HEAD is treated as GET."""
    route = _route(method, path)
    return None if route is None else NEEDS[route]


def further_needs(method: str, path: str) -> str:
    """Return the actions of a route that need a further scope; "" if there are none."""
    route = _route(method, path)
    return "" if route is None else FURTHER_NEEDS.get(route, "")


def _route(method: str, path: str) -> tuple[str, str] | None:
    asked = "GET" if method == "HEAD" else method
    if (asked, path) in _PLAIN:
        return asked, path
    return next(((of, route) for of, pattern, route in _PATTERNS if of == asked and pattern.match(path)), None)
