"""What each route needs a key for: one table, by method and route. What is not in it needs `admin`. And which of them
count as requests of the key's rate.
"""

import re
from collections.abc import Mapping

from starlette.routing import compile_path

from api.auth.principal import Scope
from api.console.paths import CONSOLE_PATHS

INFER = frozenset({Scope.INFER})
UPLOAD = frozenset({Scope.UPLOAD})
ADMIN = frozenset({Scope.ADMIN})
EITHER = INFER | UPLOAD
OPEN_PATHS = frozenset({"/health", "/ready", *CONSOLE_PATHS})
"""The console's files hold no data: the page asks for that with the key that is typed in."""
NEEDS: Mapping[tuple[str, str], frozenset[Scope]] = {
    ("POST", "/v1/chat/completions"): INFER,
    ("POST", "/v1/completions"): INFER,
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
    ("GET", "/v1/responses"): INFER,
    ("POST", "/v1/responses"): INFER,
    ("GET", "/v1/messages"): INFER,
    ("POST", "/v1/messages"): INFER,
    ("PUT", "/v1/blobs/sha256:{digest}"): UPLOAD,
    ("POST", "/v1/adapters"): UPLOAD,
    ("PATCH", "/v1/adapters/{reference}"): UPLOAD,
    ("DELETE", "/v1/adapters/{reference}"): UPLOAD,
    ("POST", "/v1/adapters/{reference}:verify"): UPLOAD,
    ("POST", "/v1/load_lora_adapter"): UPLOAD,
    ("POST", "/v1/unload_lora_adapter"): UPLOAD,
    ("GET", "/v1/models"): EITHER,
    ("GET", "/v1/models/{name:path}"): EITHER,
    ("GET", "/v1/adapters"): EITHER,
    ("GET", "/v1/adapters/{adapter_id}"): EITHER,
    ("GET", "/v1/adapters/{adapter_id}/stats"): EITHER,
    ("GET", "/info"): EITHER,
    ("GET", "/version"): EITHER,
    ("GET", "/ping"): EITHER,
    ("GET", "/openapi.json"): EITHER,
    ("GET", "/metrics"): ADMIN,
    ("GET", "/v1/pool"): ADMIN,
}
"""Any one of these scopes will do, and `admin` always."""
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Requests that change or compute something: each is one of its key's rate."""
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream", "/"})
"""But these count as many as they have prompts, once they are understood."""
_CANCEL = re.compile(r"/v1/batches/[^/]+/cancel")
"""And a batch that has used up its key's rate must not be in the way of its own end."""


def is_counted(method: str, path: str) -> bool:
    """Whether it is a request of its key's rate by having come."""
    return method in CHANGING and path not in GENERATING and _CANCEL.fullmatch(path) is None


def _compiled() -> tuple[Mapping[tuple[str, str], frozenset[Scope]], tuple[tuple[str, re.Pattern[str], str], ...]]:
    plain = {(method, path): needs for (method, path), needs in NEEDS.items() if "{" not in path}
    return plain, tuple((method, compile_path(path)[0], path) for method, path in NEEDS if "{" in path)


_PLAIN, _PATTERNS = _compiled()


def needs_no_key(method: str, path: str) -> bool:
    """Whether it is open to everybody: health, readiness, and the console's own files."""
    return method in ("GET", "HEAD") and path in OPEN_PATHS


def needed(method: str, path: str) -> frozenset[Scope] | None:
    """The scopes of the route that this is; None: it is none of the table. HEAD is as GET."""
    asked = "GET" if method == "HEAD" else method
    if (found := _PLAIN.get((asked, path))) is not None:
        return found
    for of, pattern, template in _PATTERNS:
        if of == asked and pattern.match(path):
            return NEEDS[of, template]
    return None
