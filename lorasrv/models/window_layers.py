"""Which layers of a model have its sliding window, by the rules of its family."""

from collections.abc import Mapping
from typing import Any

from lorasrv.errors import CorruptModel, UnsupportedModel

_KINDS = {"sliding_attention": True, "full_attention": False}


def windowed_layers(
    values: Mapping[str, Any], rules: Mapping[str, Any], num_layers: int, label: str, prefix: str = ""
) -> tuple[bool, ...]:
    """Whether each layer has the window; empty where all have.

    `values` are a checkpoint's, their keys begin with `prefix`; `rules` a family's section; see specs/llama.toml.
    Raises:
        CorruptModel: a list or a number that does not fit; `label` says where.
        UnsupportedModel: a kind of layer that we do not know.
    """
    switch, kinds = rules.get("window_switch"), rules.get("window_layer_types")
    if switch and not values.get(switch, False):
        return (False,) * num_layers
    if kinds and isinstance(values.get(kinds), list):
        return _listed(values[kinds], kinds, num_layers, label)
    first, pattern = rules.get("window_first_layer"), rules.get("window_pattern")
    if first is not None:
        start = _number(values, first, label)
        return tuple(layer >= start for layer in range(num_layers))
    if pattern is None:
        return ()
    key = prefix + pattern.get("key", "")
    if isinstance(values.get(key), list):
        flags = values[key]
        if len(flags) != num_layers or not all(type(flag) is bool for flag in flags):
            raise CorruptModel(f"{label}: {key} must be {num_layers} times true or false")
        return tuple(flags)
    every = _number(values, pattern | {"key": key}, label)
    if every < 1:
        raise CorruptModel(f"{label}: {key} must be positive, not {every}")
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


def _listed(kinds: list[Any], key: str, num_layers: int, label: str) -> tuple[bool, ...]:
    if len(kinds) != num_layers:
        raise CorruptModel(f"{label}: {key} has {len(kinds)} entries for {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise UnsupportedModel(f"{label}: {key} {unknown[0]!r:.60} is not supported; known: {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def _number(values: Mapping[str, Any], rule: Mapping[str, Any], label: str) -> int:
    value = values.get(rule["key"], rule["default"])
    if type(value) is not int:
        raise CorruptModel(f"{label}: {rule['key']} must be a whole number, not {value!r:.60}")
    return value
