"""Read the lines of a batch in OpenAI's format, `{"custom_id", "method", "url", "body"}`, one at a time.

A malformed line is reported with its number and does not stop the following ones. Where only the equality of lines
matters, each is represented by a key of 8 bytes, so a million lines take 8 MB.
"""

import hashlib
import secrets
from array import array
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapter_store.errors import show, show_name
from api.asgi.body_limits import MAX_JSON_BYTES
from api.asgi.json_body import parse_json
from api.errors import ApiError

FIELDS = ("custom_id", "method", "url", "body")
URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = MAX_JSON_BYTES + (64 << 10)
MAX_ID_CHARS = 512
MAX_SHOWN_PROBLEMS = 100
SKIP_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
# Random per process, so that lines with colliding keys cannot be crafted.
_SECRET = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Hold one request."""

    # Counts from 1, blank lines included.
    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """Describe why a line is not a request; `code` and `param` as OpenAI's."""

    number: int
    # None if the id could not be read.
    custom_id: str | None
    message: str
    param: str | None = None
    code: str = "invalid_line"


Line = BatchLine | MalformedLine


@dataclass(frozen=True, slots=True)
class Scan:
    """Hold the result of reading all lines."""

    # One per line.
    keys: "np.ndarray[Any, np.dtype[np.uint64]]"
    num_malformed: int
    # The first `MAX_SHOWN_PROBLEMS` problems.
    problems: list[MalformedLine] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Return the number of lines, without blank ones."""
        return len(self.keys)


class TooManyLines(Exception):
    """Report that the file has more lines than a batch may have."""


def read_lines(path: Path, endpoint: str | None = None) -> Iterator[Line]:
    """Yield the lines that are not blank. With an `endpoint`, lines for another one are malformed.

    Raises: OSError.
    """
    for number, data in _raw_lines(path):
        if data is None:
            yield MalformedLine(number, None, f"the line has more than {MAX_LINE_BYTES} bytes")
        elif text := data.strip():
            yield parse_line(number, text, endpoint)


def scan(path: Path, endpoint: str | None = None, max_lines: int | None = None) -> Scan:
    """Read all lines once.

    Raises:
        TooManyLines: before more lines are read.
        OSError.
    """
    keys = array("Q")
    problems: list[MalformedLine] = []
    num_malformed = 0
    for line in read_lines(path, endpoint):
        if len(keys) == max_lines:
            raise TooManyLines
        keys.append(line_key(line.custom_id, line.number))
        if isinstance(line, MalformedLine):
            num_malformed += 1
            if len(problems) < MAX_SHOWN_PROBLEMS:
                problems.append(line)
    return Scan(np.frombuffer(keys, np.uint64) if keys else np.empty(0, np.uint64), num_malformed, problems)


def duplicates(path: Path, found: Scan) -> list[MalformedLine]:
    """Return up to `MAX_SHOWN_PROBLEMS` lines that repeat a custom_id, each naming the line that had it first.

    Reads the file again if there are any.
    """
    ordered = np.sort(found.keys)
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]][:MAX_SHOWN_PROBLEMS].tolist())
    first: dict[int, int] = {}
    repeats: list[MalformedLine] = []
    for line in read_lines(path) if repeated else ():
        key = line_key(line.custom_id, line.number)
        if key not in repeated or len(repeats) == MAX_SHOWN_PROBLEMS:
            continue
        if key in first:
            why = f"custom_id {_show(line.custom_id)} is also that of line {first[key]}"
            repeats.append(MalformedLine(line.number, line.custom_id, why, "custom_id", "duplicate_custom_id"))
        first.setdefault(key, line.number)
    return repeats


def pending_lines(
    path: Path, endpoint: str | None, found: Scan, answered: "np.ndarray[Any, np.dtype[np.uint64]]"
) -> Generator[Line, None, None]:
    """Yield the lines whose keys are not among the answered ones."""
    is_pending = ~np.isin(found.keys, answered)
    for line, wanted in zip(read_lines(path, endpoint), is_pending, strict=False):
        if wanted:
            yield line


def line_key(custom_id: str | None, number: int) -> int:
    """Return the key of a line: from its custom_id, or from its number if it has none."""
    name = f"#{number}" if custom_id is None else f"={custom_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=_SECRET).digest())


def parse_line(number: int, data: bytes, endpoint: str | None = None) -> Line:
    """Parse one line without its end, as a request or as the reason why it is not one."""
    try:
        fields = parse_json(data)
    except ApiError as error:
        return MalformedLine(number, None, str(error.detail).replace("the body", "the line", 1))
    if not isinstance(fields, dict):
        return MalformedLine(number, None, "the line is not a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        return MalformedLine(number, None, message, "custom_id")
    url, body = fields.get("url"), fields.get("body")
    wrong = _unknown(fields) or _wrong(fields.get("method"), url, body, endpoint)
    if wrong is not None:
        return MalformedLine(number, custom_id, wrong[1], wrong[0])
    assert isinstance(url, str)
    assert isinstance(body, dict)
    return BatchLine(number, custom_id, url, body)


def _unknown(fields: Mapping[str, object]) -> tuple[str, str] | None:
    unknown = next((name for name in fields if name not in FIELDS), None)
    if unknown is None:
        return None
    shown, known = show(unknown), ", ".join(FIELDS)
    return show_name(unknown), f"a line has no field {shown}, only {known}; fields of the request belong into body"


def _wrong(method: object, url: object, body: object, endpoint: str | None) -> tuple[str, str] | None:
    if method != "POST":
        return "method", 'method must be "POST"'
    if url not in URLS:
        return "url", f"url must be one of {', '.join(URLS)}"
    if endpoint is not None and url != endpoint:
        return "url", f"url is {url}, but this batch is for {endpoint}"
    if not isinstance(body, dict):
        return "body", "body must be a JSON object"
    return None


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines, None for one that is too long; its bytes are skipped piece by piece."""
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                while data and not data.endswith(b"\n"):
                    data = file.readline(SKIP_BYTES)
                yield number, None
            else:
                yield number, data.removeprefix(_BOM) if number == 1 else data


def _show(custom_id: str | None) -> str:
    text = repr(custom_id)
    return text if len(text) <= 80 else f"{text[:77]}..."
