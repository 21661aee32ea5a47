"""Does this adapter fit this base? Every problem is found before anything is refused; nothing here imports torch.

`check_adapter` is the whole check, shared by the store and by `lorasrv check`: config, header, names, shapes, ranks and
every value of the data, in one pass over the file.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapter_store.data_scan import DataFacts, scan_data
from adapter_store.errors import AdapterInvalid, ProblemList
from adapter_store.manifest import MLX_WAY_OUT, Manifest, canonical_json, read_manifest
from adapter_store.report import UploadReport, build_report
from adapter_store.safetensors_header import (
    FILE,
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorInfo,
    header_cap_bytes,
    read_header,
)
from adapter_store.spec import AdapterKey, AdapterSpec, BaseShapes, LoraModule
from adapter_store.tensor_names import TensorPlace, locate, module_name

KEY_FORMAT = 1
MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that passed: what it is, and what to tell its uploader."""

    spec: AdapterSpec
    report: UploadReport


def validate_adapter(
    config: Mapping[str, object], header: SafetensorsHeader, base: BaseShapes, max_rank: int, *, weights_digest: str
) -> AdapterSpec:
    """Check config and header against the base; the data is `scan_data`'s.

    Raises:
        AdapterInvalid: with every problem found.
    """
    problems = ProblemList()
    manifest = read_manifest(config, problems)
    modules = match_modules(header, base, manifest, max_rank, problems)
    problems.raise_if_any()
    return make_spec(modules, header, weights_digest)


def check_adapter(
    config: Mapping[str, object], file: BinaryIO, file_bytes: int, base: BaseShapes, max_rank: int
) -> CheckedAdapter:
    """The whole check of one file, read once from its start; `spec.weights_digest` is that of the bytes read.

    Raises:
        AdapterInvalid: with every problem of config, header, names, shapes and values.
    """
    problems = ProblemList()
    manifest = read_manifest(config, problems)
    hasher = hashlib.sha256()
    facts = DataFacts()
    modules: tuple[LoraModule, ...] = ()
    header = _header(file, file_bytes, base, problems)
    if header is not None:
        file.seek(0)
        hasher.update(file.read(header.data_start))
        modules = match_modules(header, base, manifest, max_rank, problems)
        facts = scan_data(file, header, hasher, problems)
    problems.raise_if_any()
    assert header is not None
    assert manifest is not None
    spec = make_spec(modules, header, hasher.hexdigest())
    return CheckedAdapter(spec, build_report(spec, manifest, base, facts, header))


def check_files(config: Mapping[str, object], weights: Path, base: BaseShapes, max_rank: int) -> CheckedAdapter:
    """`check_adapter` for a file by its path: the offline check."""
    with weights.open("rb") as file:
        return check_adapter(config, file, weights.stat().st_size, base, max_rank)


def _header(file: BinaryIO, file_bytes: int, base: BaseShapes, problems: ProblemList) -> SafetensorsHeader | None:
    try:
        return read_header(file, file_bytes, header_cap_bytes(base))
    except AdapterInvalid as error:
        for problem in error.problems:
            problems.add(problem.code, problem.field, problem.message)
        return None


def max_adapter_bytes(base: BaseShapes, max_rank: int) -> int:
    """Largest file that an adapter of this base can have: float32, every module at the highest rank."""
    values = base.num_layers * sum(max_rank * (n_in + n_out) for n_in, n_out in base.modules.values())
    return LENGTH_BYTES + header_cap_bytes(base) + 4 * values


def match_modules(
    header: SafetensorsHeader, base: BaseShapes, manifest: Manifest | None, max_rank: int, problems: ProblemList
) -> tuple[LoraModule, ...]:
    """The adapted modules, sorted by (layer, module). Every tensor must land on one; what does not is a problem."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in header.tensors:
        if place := locate(name, base, problems):
            found.setdefault((place.layer, place.module), {})[place.half] = name
    if not found:
        problems.add("no_modules", FILE, "matches no module of this base: served as it is, it would change nothing")
    modules = []
    for (layer, module), names in sorted(found.items()):
        place = TensorPlace(layer, module, "")
        if (a_name := names.get("A")) is None or (b_name := names.get("B")) is None:
            there, missing = ("lora_B", "lora_A") if "B" in names else ("lora_A", "lora_B")
            problems.add("missing_half", _at(base, place), f"has {there} but no {missing}; save the adapter again")
            continue
        a, b = header.tensors[a_name], header.tensors[b_name]
        rank = _check_shapes(place, a, b, base, problems)
        if rank is None:
            continue
        scaling = _check_rank(place, rank, base, manifest, max_rank, problems)
        modules.append(LoraModule(layer, module, rank, scaling, a_name, b_name))
    return tuple(modules)


def _at(base: BaseShapes, place: TensorPlace) -> str:
    return module_name(base, place.layer, place.module)


def _check_shapes(
    place: TensorPlace, a: TensorInfo, b: TensorInfo, base: BaseShapes, problems: ProblemList
) -> int | None:
    """The rank, if A is [rank, in] and B is [out, rank] for this module."""
    n_in, n_out = base.modules[place.module]
    if len(a.shape) == len(b.shape) == 2 and a.shape[1] == n_in and b.shape[0] == n_out and a.shape[0] == b.shape[1]:
        return a.shape[0]
    message = (
        f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}; {place.module} of this base takes lora_A [rank, {n_in}]"
        f" and lora_B [{n_out}, rank]{_shape_hint(a.shape, b.shape, n_in, n_out)}"
    )
    problems.add("shape_mismatch", _at(base, place), message)
    return None


def _shape_hint(a: tuple[int, ...], b: tuple[int, ...], n_in: int, n_out: int) -> str:
    if a[:1] == (n_in,) and b[-1:] == (n_out,):
        return f". They look transposed: if MLX saved them, {MLX_WAY_OUT}"
    if a[:1] == (n_out,) and b[-1:] == (n_in,):
        return ". They look swapped: rename lora_A and lora_B"
    return ". The adapter was trained on another base"


def _check_rank(
    place: TensorPlace, rank: int, base: BaseShapes, manifest: Manifest | None, max_rank: int, problems: ProblemList
) -> float:
    """The module's scaling; notes a rank above the limit, one that the config contradicts, and an infinite scaling."""
    name = _at(base, place)
    if rank > max_rank:
        problems.add(
            "rank_too_large", name, f"rank {rank}; this server takes at most {max_rank} (serve --max-lora-rank {rank})"
        )
    if manifest is None:
        return 1.0
    if manifest.rank(name) != rank:
        problems.add(
            "rank_mismatch",
            name,
            f"tensors have rank {rank}, the config says {manifest.rank(name)} (r={manifest.r} and rank_pattern); "
            "upload the config that was saved with these weights",
        )
        return 1.0
    scaling = manifest.scaling(name)
    if not math.isfinite(scaling) or abs(scaling) > MAX_FLOAT32:
        problems.add("invalid_alpha", name, f"scaling {scaling} does not fit float32; correct lora_alpha")
        return 1.0
    return scaling


def make_spec(modules: tuple[LoraModule, ...], header: SafetensorsHeader, weights_digest: str) -> AdapterSpec:
    """The spec of validated modules, with its key."""
    dtypes = {info.dtype for info in header.tensors.values()}
    return AdapterSpec(
        key=adapter_key(modules, weights_digest),
        weights_digest=weights_digest,
        modules=modules,
        dtype=dtypes.pop() if len(dtypes) == 1 else "F32",
        weights_bytes=header.data_bytes,
    )


def adapter_key(modules: tuple[LoraModule, ...], weights_digest: str) -> AdapterKey:
    """sha256 over what the config does to the mathematics, resolved, and the weights' digest.

    r, lora_alpha, use_rslora and both patterns act only through each module's rank and scaling, and every other field
    either changes nothing or is refused; so two configs that say the same in other words have one key. The scaling is
    written as an exact hexadecimal float.
    """
    resolved = [[m.layer, m.module, m.rank, float(m.scaling).hex()] for m in modules]
    content = {"format": KEY_FORMAT, "modules": resolved, "weights": weights_digest}
    return AdapterKey(hashlib.sha256(canonical_json(content).encode()).hexdigest())
