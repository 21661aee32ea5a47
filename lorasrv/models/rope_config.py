"""What a checkpoint says about its rotary embedding -> `RopeSpec`."""

from collections.abc import Mapping
from typing import Any

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.spec import RopeSpec

ROPE_KINDS = ("default", "linear", "llama3")
GGUF_ROPE_KINDS = ("none", "linear")
DEFAULT_THETA = 10_000.0


def rope_from_config(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """config.json: `rope_theta` with `rope_scaling`, or both inside the newer `rope_parameters`."""
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise UnsupportedModel("config.json: RoPE parameters that differ by layer are not supported")
    kind = str(params.get("rope_type", params.get("type", "default")))
    _require_known(kind, ROPE_KINDS)
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial} is not supported, only 1.0")
    theta = _number(params, "rope_theta", _number(config, "rope_theta", DEFAULT_THETA))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=_number(params, "factor"))
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=_number(params, "factor"),
        low_freq_factor=_number(params, "low_freq_factor"),
        high_freq_factor=_number(params, "high_freq_factor"),
        original_max_position=int(_number(params, "original_max_position_embeddings", float(max_position))),
    )


def rope_from_gguf(meta: Mapping[str, Any], prefix: str) -> RopeSpec:
    """GGUF metadata. Llama 3's scaling is not here but in a tensor, which the loader adds as `factors`."""
    theta = _number(meta, f"{prefix}rope.freq_base", DEFAULT_THETA)
    kind = str(meta.get(f"{prefix}rope.scaling.type", "none"))
    if kind == "none":
        return RopeSpec(theta=theta)
    _require_known(kind, GGUF_ROPE_KINDS)
    return RopeSpec(theta=theta, kind=kind, factor=_number(meta, f"{prefix}rope.scaling.factor"))


def _require_known(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise UnsupportedModel(f"RoPE kind {kind!r:.60} is not supported; known: {', '.join(known)}")


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CorruptModel(f"RoPE: {key} must be a positive number, not {value!r:.60}")
    return float(value)
