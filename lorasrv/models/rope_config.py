"""Read the rotary embedding settings of a checkpoint into a `RopeSpec`."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.spec import RopeSpec

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
GGUF_ROPE_KINDS = ("none", "linear", "yarn", "longrope")
SHORT_FACTORS = "rope_factors_short.weight"
"""A GGUF file with this tensor has LongRoPE, regardless of the type in its metadata."""
DEFAULT_THETA = 10_000.0
_BY_LAYER = "full_attention", "sliding_attention"
Values = Mapping[str, Any]
Ropes = tuple[RopeSpec, RopeSpec | None]
"""(RoPE of all layers, or of those without a sliding window; RoPE of layers with a window, or None)"""


def rope_from_config(config: Values, max_position: int, head_dim: int, rules: Values) -> Ropes:
    """Read `rope_theta` and `rope_scaling` of config.json, or both inside the newer `rope_parameters`.

    Args:
        rules: the family's [config.rope]; see specs/llama.toml.
    Raises:
        UnsupportedModel: a kind or parameter is unknown.
        CorruptModel: a number is missing or out of range.
    """
    params, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if params and scaling and params != scaling:
        # Transformers then reads only rope_scaling, which has no theta. A user who adds rope_scaling to a file with
        # rope_parameters means both.
        raise UnsupportedModel("config.json: rope_scaling and rope_parameters differ; write all into rope_parameters")
    params = params or scaling
    theta = _number(config, "rope_theta", rules.get("theta", DEFAULT_THETA))
    local = rules.get("local")
    nested = isinstance(params, dict) and any(isinstance(value, dict) for value in params.values())
    if not isinstance(params, dict) or (nested and local is None):
        raise UnsupportedModel("config.json: RoPE parameters that differ by layer are not supported for this family")
    wanted = set(_BY_LAYER) if local and config.get("rope_parameters") else set()
    if wanted and not (nested and params.keys() <= wanted and all(isinstance(v, dict) for v in params.values())):
        raise UnsupportedModel(f"config.json: rope_parameters must be those of {' and '.join(_BY_LAYER)}")
    reader = _Reader(config, max_position, head_dim, rules)
    whole = reader.read(params.get(_BY_LAYER[0], {}) if nested else params, theta)
    if local is None:
        return whole, None
    theta = _number(config, local["key"], local["theta"])
    return whole, reader.read(params.get(_BY_LAYER[1], {}) if nested else {}, theta)


class _Reader:
    """Read a table of RoPE parameters, with defaults from the rest of config.json."""

    def __init__(self, config: Values, max_position: int, head_dim: int, rules: Values) -> None:
        self._config, self._max_position, self._head_dim, self._rules = config, max_position, head_dim, rules

    def read(self, params: Values, theta: float) -> RopeSpec:
        kind = str(params.get("rope_type", params.get("type", "default")))
        kind = self._rules.get("kinds", {}).get(kind, kind)
        _require_known(kind, self._rules.get("known", ROPE_KINDS))
        rope = RopeSpec(theta=_number(params, "rope_theta", theta), kind=kind, dims=self._dims(params))
        if kind == "linear":
            return replace(rope, factor=_number(params, "factor"))
        if kind == "llama3":
            return replace(
                rope,
                factor=_number(params, "factor"),
                low_freq_factor=_number(params, "low_freq_factor"),
                high_freq_factor=_number(params, "high_freq_factor"),
                original_max_position=self._original(params),
            )
        if kind == "yarn":
            return self._yarn(params, rope)
        return self._longrope(params, rope) if kind == "longrope" else rope

    def _dims(self, params: Values) -> int:
        partial = params.get("partial_rotary_factor", self._config.get("partial_rotary_factor"))
        if partial is None or partial == 1.0:
            return 0
        dims = int(self._head_dim * partial) if isinstance(partial, float) and 0 < partial < 1 else 1
        if not self._rules.get("partial", False) or dims % 2 or not dims:
            raise UnsupportedModel(f"config.json: partial_rotary_factor {partial!r:.60} is not supported, only 1.0")
        return dims

    def _original(self, params: Values) -> int:
        key = "original_max_position_embeddings"
        # As in transformers, the RoPE table's own value is read only if neither config.json nor the family has one.
        given = self._config.get(key, self._rules.get("original"))
        return int(_number(params if given is None else {key: given}, key, float(self._max_position)))

    def _yarn(self, params: Values, rope: RopeSpec) -> RopeSpec:
        original = self._original(params)
        factor = params.get("factor")
        factor = self._max_position / original if factor is None else _number(params, "factor")
        scale = _yarn_scale(factor)
        if params.get("mscale") and params.get("mscale_all_dim"):
            mscale, all_dim = (_number(params, key) for key in ("mscale", "mscale_all_dim"))
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
        return replace(
            rope,
            factor=factor,
            original_max_position=original,
            attention_factor=_number_or(params, "attention_factor", scale),
            beta_fast=_number_or(params, "beta_fast", 32.0),
            beta_slow=_number_or(params, "beta_slow", 1.0),
            truncate=bool(params.get("truncate", True)),
            max_position=original if params.get(self._rules.get("scaled_queries", "")) else None,
        )

    def _longrope(self, params: Values, rope: RopeSpec) -> RopeSpec:
        """Read LongRoPE for the original context only. Beyond it, transformers changes the factors of cached tokens."""
        original = self._original(params)
        factor = _number_or(params, "factor", self._max_position / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return replace(
            rope,
            kind="factors",
            factors=_factors(params.get("short_factor"), (rope.dims or self._head_dim) // 2),
            attention_factor=_number_or(params, "attention_factor", scale),
            max_position=original,
        )


def rope_from_gguf(meta: Values, prefix: str, head_dim: int, rules: Values, tensors: Collection[str] = ()) -> Ropes:
    """Read GGUF metadata.

    The factors of Llama 3's scaling and of LongRoPE are in tensors, and the loader adds them.

    Args:
        rules: the family's [gguf.rope].
        tensors: names of the file's tensors.
    Raises:
        UnsupportedModel, CorruptModel: as `rope_from_config`.
    """
    scaling = prefix + "rope.scaling."
    rope = RopeSpec(
        theta=_number(meta, f"{prefix}rope.freq_base", DEFAULT_THETA), dims=_gguf_dims(meta, prefix, head_dim, rules)
    )
    local = rules.get("local")
    second = local and replace(rope, theta=_number(meta, prefix + local["key"], local["theta"]))
    # As in llama.cpp, a factor without a type means linear.
    has_factor = f"{scaling}factor" in meta or f"{prefix}rope.scale_linear" in meta
    kind = str(meta.get(f"{scaling}type", "linear" if has_factor else "none"))
    _require_known(kind, GGUF_ROPE_KINDS)
    is_scaled = bool(meta.get(prefix + rules.get("scaled_queries", "")))
    if is_scaled and kind != "yarn":
        raise UnsupportedModel(
            f"{prefix}{rules['scaled_queries']} with RoPE scaling {kind!r} is not supported, only yarn"
        )
    factor = _number(meta, f"{scaling}attn_factor", 1.0)
    if factor != 1.0 and kind not in ("yarn", "longrope") and SHORT_FACTORS not in tensors:
        raise UnsupportedModel(f"{scaling}attn_factor {factor} is not supported with RoPE scaling {kind!r}, only 1.0")
    log_multiplier = f"{scaling}yarn_log_multiplier"
    for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier", "alpha"):
        if scaling + key in meta and not (scaling + key == log_multiplier and rules.get("log_multiplier")):
            raise UnsupportedModel(f"RoPE with {scaling}{key} is not supported")
    if kind == "linear":
        old = meta.get(f"{prefix}rope.scale_linear")
        return replace(rope, kind=kind, factor=_number(meta, f"{scaling}factor", old)), second
    if kind == "longrope":
        return replace(rope, kind="factors"), second
    if kind == "yarn":
        rope = replace(
            rope,
            kind=kind,
            factor=_number(meta, f"{scaling}factor"),
            original_max_position=int(_number(meta, f"{scaling}original_context_length")),
            beta_fast=_number(meta, f"{scaling}yarn_beta_fast", 32.0),
            beta_slow=_number(meta, f"{scaling}yarn_beta_slow", 1.0),
        )
        # Like mscale_all_dim with an mscale of 1.
        all_dim = _number(meta, log_multiplier) if meta.get(log_multiplier) else 0.0
        scale = _yarn_scale(rope.factor) / _yarn_scale(rope.factor, all_dim)
        return replace(
            rope, attention_factor=factor * scale, max_position=rope.original_max_position if is_scaled else None
        ), second
    return rope, second


def longrope_from_gguf(rope: RopeSpec, meta: Values, prefix: str, short: tuple[float, ...]) -> RopeSpec:
    """Return `rope` with the factors of the tensor `SHORT_FACTORS`, for the original context."""
    scaling = prefix + "rope.scaling."
    return replace(
        rope,
        kind="factors",
        factors=short,
        attention_factor=_number(meta, f"{scaling}attn_factor", 1.0),
        max_position=int(_number(meta, f"{scaling}original_context_length")),
    )


def _gguf_dims(meta: Values, prefix: str, head_dim: int, rules: Values) -> int:
    turned = meta.get(f"{prefix}rope.dimension_count", head_dim)
    if turned == head_dim:
        return 0
    if not rules.get("partial", False) or type(turned) is not int or not 0 < turned < head_dim or turned % 2:
        raise UnsupportedModel(f"RoPE over {turned!r:.60} of {head_dim} dimensions of a head is not supported")
    return turned


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(value: Any, count: int) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else []
    good = all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in numbers)
    if not good or len(numbers) != count:
        raise CorruptModel(f"RoPE: short_factor must be a list of {count} positive numbers")
    return tuple(float(x) for x in numbers)


def _require_known(kind: str, known: Sequence[str]) -> None:
    if kind not in known:
        raise UnsupportedModel(f"RoPE kind {kind!r:.60} is not supported; known: {', '.join(known)}")


def _number_or(values: Values, key: str, default: float) -> float:
    """Read a number as `_number` does; null and 0 count as missing."""
    return _number(values, key) if values.get(key) else default


def _number(values: Values, key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CorruptModel(f"RoPE: {key} must be a positive number, not {value!r:.60}")
    return float(value)
