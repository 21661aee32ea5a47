"""What an uploader is told about an accepted adapter."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from adapter_store.data_scan import DataFacts
from adapter_store.errors import show
from adapter_store.manifest import Manifest
from adapter_store.safetensors_header import SafetensorsHeader
from adapter_store.spec import AdapterKey, AdapterSpec, BaseShapes
from adapter_store.tensor_names import module_name


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What was matched, and how strong. `layers` counts the layers touched; `digest` is the AdapterKey.

    `modules_expected` counts the modules of the base that the config's target_modules names; where that is a pattern,
    which is never run, those matched.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `warnings` is a list."""
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "UploadReport":
        """Inverse of `to_dict`."""
        known = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**known, "warnings": tuple(known["warnings"])})


def build_report(
    spec: AdapterSpec, manifest: Manifest, base: BaseShapes, facts: DataFacts, header: SafetensorsHeader
) -> UploadReport:
    """The report of a validated adapter."""
    ranks = [m.rank for m in spec.modules]
    scalings = [m.scaling for m in spec.modules]
    expected = _expected_modules(spec, manifest, base)
    return UploadReport(
        modules_matched=len(spec.modules),
        modules_expected=len(expected),
        layers=len({m.layer for m in spec.modules}),
        rank_min=min(ranks),
        rank_max=max(ranks),
        scaling_min=min(scalings),
        scaling_max=max(scalings),
        dtype=spec.dtype,
        weights_bytes=spec.weights_bytes,
        digest=spec.key,
        warnings=tuple(_warnings(spec, manifest, base, facts, header, expected)),
    )


def _expected_modules(spec: AdapterSpec, manifest: Manifest, base: BaseShapes) -> set[tuple[int, str]]:
    matched = {(m.layer, m.module) for m in spec.modules}
    every = [(layer, module) for layer in range(base.num_layers) for module in base.modules]
    return matched | {(i, m) for i, m in every if manifest.targets(i, module_name(base, i, m))}


def _warnings(
    spec: AdapterSpec,
    manifest: Manifest,
    base: BaseShapes,
    facts: DataFacts,
    header: SafetensorsHeader,
    expected: set[tuple[int, str]],
) -> list[str]:
    return [
        *_untrained(spec, facts),
        *_partial(spec, base, expected),
        *_other_base(manifest.base_model_name, base.name),
        *_mixed_types(header),
    ]


def _untrained(spec: AdapterSpec, facts: DataFacts) -> list[str]:
    idle = [m for m in spec.modules if m.scaling == 0 or {m.a_name, m.b_name} & facts.zero_tensors]
    if len(idle) == len(spec.modules):
        return ["untrained: lora_B (or lora_A, or the scaling) is zero everywhere, so answers equal the base's"]
    return [f"lora_A or lora_B is all zero in {len(idle)} of {len(spec.modules)} modules"] if idle else []


def _partial(spec: AdapterSpec, base: BaseShapes, expected: set[tuple[int, str]]) -> list[str]:
    missing = sorted(expected - {(m.layer, m.module) for m in spec.modules})
    if not missing:
        return []
    first = module_name(base, *missing[0])
    return [
        f"partial: {len(missing)} of {len(expected)} targeted modules have no tensors and stay as the base ({first})"
    ]


def _other_base(trained_on: str, served: str) -> list[str]:
    """Names are compared without owner, case, punctuation; a folder's path is never repeated in full."""
    last = trained_on.replace("\\", "/").rstrip("/").rpartition("/")[2]
    ours, theirs = _plain(served.replace("\\", "/").rpartition("/")[2]), _plain(last)
    if not ours or not theirs or ours in theirs or theirs in ours:
        return []
    return [f"trained on {show(last)}, served on {show(served)}: shapes fit, but check that it is the same base"]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _mixed_types(header: SafetensorsHeader) -> list[str]:
    dtypes = sorted({info.dtype for info in header.tensors.values()})
    return [f"types {' and '.join(dtypes)} are mixed; all are widened to F32"] if len(dtypes) > 1 else []
