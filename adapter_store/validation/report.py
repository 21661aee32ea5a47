"""Report about an accepted adapter, including warnings about another base model or quantization.

Base models are compared by name: the last part of a hub id or path. Suffixes after the model's own name describe the
encoding of the file (`-GPTQ-Int8`, `-unsloth-bnb-4bit`, `.Q4_K_M`). The rest must be equal: Llama-3.2-1B is not
Llama-3.2-1B-Instruct.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from adapter_store.errors import show
from adapter_store.formats.adapter_config import AdapterConfig
from adapter_store.formats.safetensors_file import SafetensorsHeader
from adapter_store.spec import BF16, AdapterKey, AdapterSpec, BaseShapes, Form
from adapter_store.validation.int8_drift import Drift
from adapter_store.validation.tensor_scan import DataFacts

MAX_CHARS = 200
_FORMAT = r"hf|gguf|ggml|mlx|unsloth|dynamic|quantized|bf16|fp?16|fp?32"
_QUANTIZED = (
    r"bnb|gptq|awq|hqq|autoround|qat|exl[23]|nf4|mxfp[48]|nvfp4|[1-8]bit|(?:int|fp)[1-8]|w\d{1,2}a\d{1,2}|"
    r"(?:ud[-_])?i?q[1-8](?:_(?:[01k]|nl|xxs|xs|s|m|l|xl))*"
)
_SUFFIX = re.compile(rf"[-._ ](?:({_QUANTIZED})|{_FORMAT})$")


@dataclass(frozen=True, slots=True)
class BaseName:
    """Hold a base's name: `model` without case and punctuation, `quantization` the encoding suffixes in order."""

    shown: str
    model: str
    quantization: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "BaseName":
        """Parse a name or path; only the last part of a path is ever shown."""
        shown = text.replace("\\", "/").rstrip("/").rpartition("/")[2]
        rest, quantization = shown[-MAX_CHARS:].lower(), []
        while suffix := _SUFFIX.search(rest):
            rest = rest[: suffix.start()]
            quantization += [suffix[1]] if suffix[1] else []
        return cls(shown, "".join(c for c in rest if c.isalnum()), tuple(reversed(quantization)))


def base_warnings(trained_on: str, served: str) -> list[str]:
    """Return warnings if an adapter was trained on another model or quantization than the served one.

    An adapter trained on unquantized weights fits any quantization of them: that choice is the operator's.
    """
    theirs, ours = BaseName.of(trained_on), BaseName.of(served)
    if not (theirs.model and ours.model):
        return []
    names = f"trained on {show(theirs.shown)}, served on {show(ours.shown)}"
    if theirs.model != ours.model:
        return [f"{names}: shapes fit, but check that it is the same base"]
    if theirs.quantization and theirs.quantization != ours.quantization:
        return [f"{names}: another quantization than it was trained with, so answers may differ slightly"]
    return []


@dataclass(frozen=True, slots=True)
class UploadReport:
    """Report what was matched, and its strength. `layers` counts the adapted layers; `digest` is the AdapterKey.

    `modules_expected` counts the matched modules and others that target_modules names (unknown, so none, if it is a
    pattern). `norm_b` is the sum of the Frobenius norms of lora_B, None in old reports; `notices` name what was read
    beside the matrices or under another name. `drift` is the change by the form `stored`, None for "bf16".
    """

    modules_matched: int
    modules_expected: int
    layers: int
    rank_min: int
    rank_max: int
    scaling_min: float
    scaling_max: float
    dtype: str
    weights_bytes: int
    digest: AdapterKey
    warnings: tuple[str, ...]
    norm_b: float | None = None
    notices: tuple[str, ...] = ()
    stored: Form = BF16
    drift: Drift | None = None

    @property
    def is_partial(self) -> bool:
        """Return whether the config names modules without tensors, which the uploader allowed."""
        return self.modules_expected > self.modules_matched

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `warnings` and `notices` are lists."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}
        return shown | {"drift": None if self.drift is None else self.drift.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "UploadReport":
        """Build a report from `to_dict`; an old one may lack the fields that have a default."""
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known.update({name: tuple(known[name]) for name in ("warnings", "notices") if name in known})
        if known.get("drift") is not None:
            known["drift"] = Drift.from_dict(known["drift"])
        return cls(**known)


def build_report(
    spec: AdapterSpec,
    adapter_config: AdapterConfig,
    base: BaseShapes,
    facts: DataFacts,
    header: SafetensorsHeader,
    missing: tuple[str, ...],
    notices: tuple[str, ...],
    drift: Drift | None,
) -> UploadReport:
    """Build the report of a validated adapter. `missing` holds the modules that the config names and the file lacks."""
    ranks = [m.rank for m in spec.modules]
    scalings = [m.scaling for m in spec.modules]
    warnings = [
        *_untrained(spec, facts),
        *_partial(missing, len(spec.modules)),
        *base_warnings(adapter_config.base_model_name, base.checkpoint or base.name),
        *_multimodal(notices),
        *_mixed_types(spec, header),
        *(drift.warnings() if drift is not None else ()),
    ]
    return UploadReport(
        modules_matched=len(spec.modules),
        modules_expected=len(spec.modules) + len(missing),
        layers=len({m.layer for m in spec.modules if m.module not in base.ends}),
        rank_min=min(ranks),
        rank_max=max(ranks),
        scaling_min=min(scalings),
        scaling_max=max(scalings),
        dtype=spec.dtype,
        weights_bytes=spec.weights_bytes,
        digest=spec.key,
        warnings=tuple(warnings),
        norm_b=math.fsum(facts.norms[m.b_name] for m in spec.modules),
        notices=notices,
        stored=spec.stored,
        drift=drift,
    )


def _untrained(spec: AdapterSpec, facts: DataFacts) -> list[str]:
    idle = [m for m in spec.modules if m.scaling == 0 or {m.a_name, m.b_name} & facts.zero_tensors]
    if len(idle) == len(spec.modules):
        return ["untrained: lora_B (or lora_A, or the scaling) is zero everywhere, so answers equal the base's"]
    return [f"lora_A or lora_B is all zero in {len(idle)} of {len(spec.modules)} modules"] if idle else []


def _partial(missing: tuple[str, ...], num_matched: int) -> list[str]:
    if not missing:
        return []
    what = f"{len(missing)} of {num_matched + len(missing)} targeted modules have no tensors and stay as the base"
    return [f"partial: {what} ({missing[0]})"]


def _multimodal(notices: tuple[str, ...]) -> list[str]:
    if not any("language_model." in notice for notice in notices):
        return []
    what = "right only if this base is that part, which shapes cannot tell"
    return [f"trained on the language part of a multimodal model: {what}"]


def _mixed_types(spec: AdapterSpec, header: SafetensorsHeader) -> list[str]:
    dtypes = sorted({header.tensors[name].dtype for m in spec.modules for name in (m.a_name, m.b_name)})
    return [f"types {' and '.join(dtypes)} are mixed; all are widened to F32"] if len(dtypes) > 1 else []
