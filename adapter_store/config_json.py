"""An adapter's config as JSON, before anything in it is understood: how large, how deep, and of what it may be."""

import json
import math
from collections.abc import Iterator, Mapping

from adapter_store.errors import ProblemList, show

MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_DEPTH = 32

Config = Mapping[str, object]


def check_json(config: Config, problems: ProblemList) -> bool:
    """Plain, finite, shallow JSON of bounded size: configs also arrive as parsed objects, not only as bytes."""
    before = len(problems)
    stack: list[tuple[str, object, int]] = [("", config, 0)]
    nodes = 0
    while stack and nodes <= MAX_CONFIG_BYTES:
        path, value, depth = stack.pop()
        nodes += 1
        if depth > MAX_CONFIG_DEPTH:
            problems.add("malformed_config", path[:80], f"is nested deeper than {MAX_CONFIG_DEPTH} levels")
            return False
        if isinstance(value, Mapping | list):
            stack.extend((p, v, depth + 1) for p, v in _children(path, value, problems))
        elif not _is_scalar(value):
            problems.add("malformed_config", path, f"{show(value)} is no value that JSON can hold")
    if len(problems) == before and len(json.dumps(config, default=dict)) > MAX_CONFIG_BYTES:
        problems.add("config_too_large", "adapter_config.json", f"has more than {MAX_CONFIG_BYTES} bytes")
    return len(problems) == before


def _children(path: str, value: object, problems: ProblemList) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                problems.add("malformed_config", path, f"key {show(key)} must be a string")
            else:
                yield f"{path}.{show(key)[1:-1]}".lstrip("."), item


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str)
