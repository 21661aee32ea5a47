"""Record traffic as a trace file, one line of JSON per finished request, and read it back. Torch-free.

A request needs `arrival_s`, `prompt_tokens` and `output_tokens`; `adapter` is an id, or null for the base. The other
fields make a replay more faithful; a server has measured `tier` and the fields that end in `_ms`. Unknown fields are
ignored.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from lorasrv.errors import InvalidTrace
from lorasrv.outputs import AdapterTier

MAX_COUNT = 1 << 40
MAX_TOKENS = 1 << 24
MAX_ARRIVAL_S = 1e9
MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Describe one request of a trace."""

    # Seconds since the start of the trace.
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None = None
    # The request's `max_tokens`; None: as many as it got.
    max_tokens: int | None = None
    # Prompt tokens found in the prefix cache.
    cached_tokens: int = 0
    priority: int = 0
    timeout_s: float | None = None
    # Principal of the API key.
    key: str | None = None
    adapter_bytes: int | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    queue_ms: float | None = None
    load_ms: float | None = None
    tier: AdapterTier | None = None
    # Steps that gave it tokens; draft tokens that these steps verified, and those that were right.
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Finish reason.
    finish: str | None = None

    def line(self) -> str:
        """Return the request as a line of a file, without fields that have their defaults."""
        known = {name: getattr(self, name) for name in _DEFAULTS}
        return json.dumps({name: value for name, value in known.items() if value != _DEFAULTS[name]})


_DEFAULTS = {f.name: f.default for f in fields(TraceRequest)}


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read all requests of a file, in order of arrival.

    Raises:
        InvalidTrace: a line is malformed (the message names the line and the field), or the file is empty.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        requests = sorted(_requests(file, path.name), key=lambda request: request.arrival_s)
    if not requests:
        raise InvalidTrace(f"{path.name}: the trace is empty; `lorasrv serve --record-trace FILE` writes one")
    return tuple(requests)


def parse_line(line: str | bytes, where: str) -> TraceRequest:
    """Parse one request.

    Raises:
        InvalidTrace: the line is malformed; the message begins with `where`.
    """
    try:
        facts = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InvalidTrace(f"{where}: not a line of JSON") from None
    if not isinstance(facts, dict):
        raise InvalidTrace(f"{where}: must be a JSON object, not {_shown(facts)}")
    given = {}
    for name, default in _DEFAULTS.items():
        if facts.get(name) is not None:
            given[name] = _checked(name, facts[name], where)
        elif default is MISSING:
            raise InvalidTrace(f"{where}: {name} is missing")
    request = TraceRequest(**given)
    _check_together(request, where)
    return request


def _requests(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse_line(line, f"{name}:{number}")


def _check_together(request: TraceRequest, where: str) -> None:
    if request.max_tokens is not None and request.max_tokens < request.output_tokens:
        raise InvalidTrace(
            f"{where}: max_tokens is {request.max_tokens}, less than output_tokens, {request.output_tokens}"
        )
    if request.cached_tokens > request.prompt_tokens:
        raise InvalidTrace(
            f"{where}: cached_tokens is {request.cached_tokens}, more than prompt_tokens, {request.prompt_tokens}"
        )
    if request.accepted_tokens > request.drafted_tokens:
        raise InvalidTrace(
            f"{where}: accepted_tokens is {request.accepted_tokens}, more than drafted_tokens, {request.drafted_tokens}"
        )


def _checked(name: str, value: Any, where: str) -> Any:
    holds, rule = _RULES[name]
    if not holds(value):
        raise InvalidTrace(f"{where}: {name} must be {rule}, not {_shown(value)}")
    return AdapterTier(value) if name == "tier" else value


def _no_number(text: str) -> object:
    """Wrap NaN and infinities, which are not JSON, so that each check rejects them and the message shows them."""
    return _NotANumber(text)


@dataclass(frozen=True, slots=True)
class _NotANumber:
    text: str


def _shown(value: object) -> str:
    if isinstance(value, _NotANumber):
        return value.text
    text = json.dumps(value, default=lambda v: v.text)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float, *, above: bool = False) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high and (value > low or not above)


def _one_of(names: Sequence[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_POSITIVE = (_integer(1, MAX_TOKENS), "a positive integer")
_COUNT = (_integer(0, MAX_TOKENS), "an integer, 0 or more")
_MEASURED = (_number(0.0, 1e12), "a number of milliseconds, 0 or more")
_TIERS = tuple(tier.value for tier in AdapterTier)
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "arrival_s": (_number(0.0, MAX_ARRIVAL_S), f"a number of seconds between 0 and {MAX_ARRIVAL_S:g}"),
    "prompt_tokens": _POSITIVE,
    "output_tokens": _POSITIVE,
    "adapter": (_is_text, "a name, or null for the base"),
    "max_tokens": _POSITIVE,
    "cached_tokens": _COUNT,
    "priority": (_integer(-1000, 1000), "an integer between -1000 and 1000"),
    "timeout_s": (_number(0.0, 86400.0, above=True), "above 0 and at most 86400"),
    "key": (_is_text, "a string that is not empty"),
    "adapter_bytes": (_integer(1, MAX_COUNT), "a positive integer"),
    "ttft_ms": _MEASURED,
    "total_ms": _MEASURED,
    "queue_ms": _MEASURED,
    "load_ms": _MEASURED,
    "tier": (_one_of(_TIERS), f"one of {', '.join(_TIERS)}"),
    "steps": _COUNT,
    "drafted_tokens": _COUNT,
    "accepted_tokens": _COUNT,
    "finish": (_is_text, "a string that is not empty"),
}
