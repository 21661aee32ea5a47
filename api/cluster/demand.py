"""Read from a request what the choice of its replica depends on. The replica checks the request, not this module."""

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from adapter_store.composition import MAX_COMPONENTS, is_sum, parse_sum
from adapter_store.errors import AdapterError
from api.asgi.json_body import INLINE_BYTES
from lorasrv.placement.placement import CHARS_PER_TOKEN, SESSION_CHARS, Demand
from lorasrv.placement.work import WorkEstimator

_WARM = re.compile(r"/v1/adapters/([^/]+):warm")
_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
_CONVERSATIONS = ("messages", "input", "prompt", "inputs")
Fields = Mapping[str, Any]


async def read_demand(
    path: str, session: str | None, body: bytes, base_names: Collection[str], estimator: WorkEstimator
) -> Demand:
    """Describe a request to the placement. A body that is not a JSON object gives no preference for a replica.

    Args:
        session: value of the header x-session-id.
        base_names: names of the base model.
    """
    fields = _parsed(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(_parsed, body)
    adapter_id = _warmed(path) or adapter_of(fields, base_names)
    prompt_tokens = len(body) / CHARS_PER_TOKEN
    work_s = estimator.work_s(adapter_id, prompt_tokens, _most_tokens(fields))
    return Demand(adapter_id, work_s, session or _session(fields), prompt_tokens=prompt_tokens)


def adapter_of(fields: Fields, base_names: Collection[str]) -> str | None:
    """Return the id of the adapter that answers, without alias or version; None for the base.

    Sums of the same adapters have the same key, whatever their weights, because they share host copies.
    """
    named = fields.get("adapters")
    if isinstance(named, list) and named:
        return _sum_key(part.get("id") if isinstance(part, dict) else None for part in named[:MAX_COMPONENTS])
    name = fields.get("adapter_id") or fields.get("model")
    if not isinstance(name, str) or not name or name in base_names:
        return None
    if not is_sum(name):
        return id_of(name)
    try:
        return _sum_key(part for part, _ in parse_sum(name))
    except (AdapterError, ValueError):
        return name


def id_of(reference: str) -> str:
    """Return the id of a reference such as `mia:prod`, `mia@3` or `mia@sha256:...`."""
    return re.split("[:@]", reference, maxsplit=1)[0] or reference


def _sum_key(names: Any) -> str:
    return "+".join(sorted({id_of(name) for name in names if isinstance(name, str)}))


def _parsed(body: bytes) -> Fields:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    parameters = fields.get("parameters")
    # TGI and LoRAX nest their options in `parameters`.
    return {**parameters, **fields} if isinstance(parameters, dict) else fields


def _warmed(path: str) -> str | None:
    found = _WARM.fullmatch(path)
    return found and id_of(found[1])


def _session(fields: Fields) -> str | None:
    user = fields.get("user")
    if isinstance(user, str) and user:
        return f"user {user}"
    return _beginning(fields) or None


def _beginning(fields: Fields) -> str:
    """Return the first characters of the conversation or prompt."""
    given = next((fields[name] for name in _CONVERSATIONS if name in fields), None)
    turns = given if isinstance(given, list) and isinstance(next(iter(given), None), dict) else [{"content": given}]
    texts = [fields.get("instructions"), *map(_content, turns[:SESSION_CHARS])]
    begun = ""
    for text in texts:
        if text is not None:
            begun += text if isinstance(text, str) else json.dumps(_first(text))
        if len(begun) >= SESSION_CHARS:
            break
    return begun[:SESSION_CHARS]


def _content(turn: Any) -> Any:
    return turn.get("content") if isinstance(turn, dict) else None


def _first(value: Any) -> Any:
    """Return as many elements of a list as the beginning can need."""
    return value[:SESSION_CHARS] if isinstance(value, list) else value


def _most_tokens(fields: Fields) -> int | None:
    asked = (fields.get(name) for name in _MOST_TOKENS)
    return next((value for value in asked if isinstance(value, int) and value > 0), None)
