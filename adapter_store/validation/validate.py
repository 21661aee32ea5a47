"""Validation of an adapter against the base, without torch. Every problem is found before an adapter is refused.

`check_adapter` is the complete check, shared by the store and by `lorasrv check`: config, header, names, shapes, ranks,
completeness and every value of the data, in one pass over the file. `validate_adapter` is repeated when a stored
adapter is loaded. It does not check completeness, which was decided, and perhaps waived, at the upload.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from adapter_store.errors import AdapterInvalid, ProblemList, show
from adapter_store.formats.adapter_config import (
    LINEARS_ONLY,
    MIN_MAX_NAMES,
    MLX_REMEDY,
    AdapterConfig,
    canonical_json,
    is_foreign,
    read_adapter_config,
)
from adapter_store.formats.draft_heads import is_head_name, match_heads, max_head_bytes
from adapter_store.formats.safetensors_file import (
    FILE,
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorInfo,
    header_cap_bytes,
    read_header,
)
from adapter_store.formats.tensor_names import (
    B_BIAS,
    MAGNITUDE,
    TRAINING_ONLY,
    A,
    B,
    TensorPlace,
    locate,
    module_name,
)
from adapter_store.formats.weights import pooling_factor
from adapter_store.spec import (
    BF16,
    INT8,
    MAX_LORA_RANK,
    AdapterKey,
    AdapterSpec,
    AddedToken,
    BaseShapes,
    Form,
    HeadBlock,
    LoraModule,
    SavedTensor,
    VocabRows,
)
from adapter_store.validation.extra_tensors import (
    Parts,
    Site,
    check_lora_extras,
    check_promised,
    check_shared,
    check_tying,
    is_copied,
    match_saved,
    missing_biases,
    notices_of,
)
from adapter_store.validation.int8_drift import measure_drift
from adapter_store.validation.report import UploadReport, build_report
from adapter_store.validation.target_modules import check_complete, check_targeted, missing_modules, spellings
from adapter_store.validation.tensor_scan import DataFacts, scan_data
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS, match_rows, row_notices

KEY_FORMAT = 1
_MOST_VECTORS = 3
"""Most other tensors of a linear: a magnitude, a bias beside lora_B and one that replaces the base's."""
_RESIZED = (
    ". Was the model resized? Cut rows and columns off that only pad its tables, or train rows of added tokens instead "
    "of LoRA (trainable_token_indices)"
)
MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """Hold an adapter that passed: its spec, and the report for its uploader."""

    spec: AdapterSpec
    report: UploadReport


@dataclass(frozen=True, slots=True)
class MatchedTensors:
    """Hold the match of tensors to the base.

    `modules` and `saved` passed, sorted by (layer, module), as did `rows`, of which later ones replace earlier ones.
    `groups` holds the tensors of every module by part, `places` the place of every A and B, `notices` what was read
    beside the matrices or under another name.
    """

    modules: tuple[LoraModule, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    groups: Mapping[Site, Parts] = field(default_factory=dict)
    places: tuple[TensorPlace, ...] = ()
    notices: tuple[str, ...] = ()
    heads: tuple[tuple[HeadBlock, ...], ...] = ()
    rows: tuple[VocabRows, ...] = ()
    vocab_size: int = 0
    added_tokens: tuple[AddedToken, ...] = ()
    invocation_tokens: tuple[int, ...] = ()


def validate_adapter(
    config: Mapping[str, object],
    header: SafetensorsHeader,
    base: BaseShapes,
    max_rank: int,
    *,
    weights_digest: str,
    stored: Form = BF16,
) -> AdapterSpec:
    """Check config and header against the base; `scan_data` checks the values.

    Raises:
        AdapterInvalid: with every problem found.
    """
    problems = ProblemList()
    adapter_config = read_adapter_config(config, problems, max_names(base))
    matched = match_modules(header, base, adapter_config, max_rank, problems)
    problems.raise_if_any()
    return make_spec(matched, header, weights_digest, stored)


def check_adapter(
    config: Mapping[str, object],
    file: BinaryIO,
    file_bytes: int,
    base: BaseShapes,
    max_rank: int,
    *,
    allow_partial: bool = False,
    stored: Form = BF16,
    allow_drift: bool = False,
) -> CheckedAdapter:
    """Check one file completely, reading it once from its start; `spec.weights_digest` is the digest of the bytes read.

    Args:
        config: the adapter's config.
        file: the weights.
        file_bytes: the length of `file`.
        base: shapes that the adapter must fit.
        max_rank: highest rank accepted.
        allow_partial: accept a config that names more modules than there are tensors for.
        stored: the form to keep the adapter in. For "int8", the matrices are read a second time, to measure the drift.
        allow_drift: accept any drift.

    Raises:
        AdapterInvalid: with every problem of config, header, names, shapes and values; if there is none, with those of
            the form.
    """
    problems = ProblemList()
    if stored not in get_args(Form):
        problems.add("invalid_stored", "stored", f"= {show(stored)}; it must be {' or '.join(get_args(Form))}")
    adapter_config = read_adapter_config(config, problems, max_names(base))
    if is_foreign(config):
        problems.raise_if_any()
    hasher = hashlib.sha256()
    facts = DataFacts()
    matched = MatchedTensors()
    missing: tuple[str, ...] = ()
    header = _header(file, file_bytes, base, problems)
    if header is not None:
        file.seek(0)
        hasher.update(file.read(header.data_start))
        matched = match_modules(header, base, adapter_config, max_rank, problems)
        if adapter_config is not None and matched.places:
            missing = _check_modules(adapter_config, base, matched, header, problems, allow_partial)
        facts = scan_data(file, header, hasher, problems, frozenset(m.b_name for m in matched.modules))
    problems.raise_if_any()
    assert header is not None
    assert adapter_config is not None
    check_shared(file, header, matched.modules, matched.rows, base, adapter_config, problems)
    drift = None
    if stored == INT8:
        drift = measure_drift(file, header, matched.modules, base, problems, allow_drift=allow_drift)
    problems.raise_if_any()
    spec = make_spec(matched, header, hasher.hexdigest(), stored)
    report = build_report(spec, adapter_config, base, facts, header, missing, matched.notices, drift)
    return CheckedAdapter(spec, report)


def check_files(
    config: Mapping[str, object], weights: Path, base: BaseShapes, max_rank: int, **terms: Any
) -> CheckedAdapter:
    """Check a file by its path, for the offline check; `terms` are the keyword arguments of `check_adapter`."""
    with weights.open("rb") as file:
        return check_adapter(config, file, weights.stat().st_size, base, max_rank, **terms)


def _check_modules(
    adapter_config: AdapterConfig,
    base: BaseShapes,
    matched: MatchedTensors,
    header: SafetensorsHeader,
    problems: ProblemList,
    allow_partial: bool,
) -> tuple[str, ...]:
    """Compare the config's modules with those that have tensors; return the names of those without."""
    check_targeted(adapter_config, base, matched.places, problems)
    check_promised(matched.groups, base, adapter_config, problems)
    check_tying(matched.groups, base, adapter_config, problems)
    found = {(place.layer, place.module) for place in matched.places}
    expected = (
        *missing_modules(adapter_config.selection, base, found, header.tensors),
        *missing_biases(matched.groups, base, adapter_config),
    )
    missing = tuple(name for name in expected if not is_copied(name, adapter_config))
    if not allow_partial:
        check_complete(missing, len(found) + len(missing), problems)
    return missing


def _header(file: BinaryIO, file_bytes: int, base: BaseShapes, problems: ProblemList) -> SafetensorsHeader | None:
    try:
        return read_header(file, file_bytes, header_cap_bytes(base))
    except AdapterInvalid as error:
        for problem in error.problems:
            problems.add(problem.code, problem.field, problem.message)
        return None


def max_names(base: BaseShapes) -> int:
    """Return the most entries of a pattern or list of modules in a config: twice the modules of the base."""
    return max(MIN_MAX_NAMES, 2 * base.num_layers * len(base.modules))


def max_adapter_bytes(base: BaseShapes, max_rank: int) -> int:
    """Return the bytes of the largest adapter of this base: float32, every module at the highest rank, copies of the
    embedding and the head, and Medusa heads.
    """
    linears = sum(max_rank * (n_in + n_out) + _MOST_VECTORS * n_out for n_in, n_out in base.modules.values())
    outside = sum(max_rank * (n_in + n_out) + n_in * n_out for n_in, n_out in base.ends.values()) + base.hidden_size
    outside += len(base.ends) * MAX_ADDED_TOKENS * base.hidden_size
    values = base.num_layers * (linears + sum(base.norms.values())) + outside
    return LENGTH_BYTES + header_cap_bytes(base) + 4 * values + max_head_bytes(base.hidden_size)


def match_modules(
    header: SafetensorsHeader,
    base: BaseShapes,
    adapter_config: AdapterConfig | None,
    max_rank: int,
    problems: ProblemList,
) -> MatchedTensors:
    """Return the adapted modules and the heads; record a problem for each tensor that matches no module, or the same
    part as another tensor.
    """
    of_heads = [name for name in header.tensors if is_head_name(name)]
    heads = match_heads(header, of_heads, base.hidden_size, problems)
    idle = {name for name in header.tensors if any(part in name for part in TRAINING_ONLY)}
    others = [name for name in header.tensors if name not in idle and not is_head_name(name)]
    places = {name: place for name in others if (place := locate(name, base, problems))}
    groups = _groups(places, base, problems)
    invocation = () if adapter_config is None else adapter_config.invocation_tokens
    modules = []
    for (layer, module), names in sorted(groups.items()):
        at = module_name(base, layer, module)
        if not is_adapted(names):
            continue
        if (a_name := names.get(A)) is None or (b_name := names.get(B)) is None:
            missing = " and no ".join(f"lora_{half}" for half in (A, B) if half not in names)
            problems.add("missing_half", at, f"has no {missing}; save the adapter again")
            continue
        a, b = header.tensors[a_name], header.tensors[b_name]
        group_size = _group_size(module, a, base, adapter_config)
        rank = _check_shapes(places[a_name], a, b, base, group_size, problems)
        if rank is None:
            continue
        factor = pooling_factor(base.widths(module)[0], group_size)
        scaling = _check_rank(places[a_name], rank, base, adapter_config, max_rank, factor, problems)
        extras = check_lora_extras((layer, module), names, header, base, adapter_config, problems)
        if adapter_config is not None and module == base.embedding and (variant := adapter_config.linears_only):
            what = f"has LoRA, and PEFT has no {variant} for embeddings; {LINEARS_ONLY[variant]}"
            problems.add(f"unsupported_{variant}", at, what)
        if group_size > 1 and (invocation or any(extras.values())):
            what = "PEFT applies no DoRA, lora_bias or aLoRA to pooled inputs (use_qalora); train again without it"
            problems.add("unsupported_use_qalora", at, what)
        modules.append(LoraModule(layer, module, rank, scaling, a_name, b_name, **extras, group_size=group_size))
    saved = match_saved(groups, header, base, adapter_config, problems)
    vocabulary = match_rows(groups, header, base, adapter_config, problems)
    rows, added = vocabulary.rows, () if adapter_config is None else adapter_config.added_tokens
    if invocation:
        _check_activated(invocation, bool(saved or rows or added), base, problems)
    notices = dict.fromkeys(notice for place in places.values() for notice in place.name.notices)
    notices |= dict.fromkeys([*notices_of(tuple(modules), saved, base), *row_notices(rows)])
    if adapter_config is not None and (unmatched := adapter_config.selection.unmatched):
        notices[f"{unmatched} is an expression that is not matched here; the tensors say what is adapted"] = None
    if adapter_config is not None and adapter_config.selection.is_empty:
        notices["has no target_modules, where PEFT adapts its defaults for the model; the tensors say what is"] = None
    if idle:
        notices[f"holds {len(idle)} tensors that only training reads"] = None
    if added:
        notices[f"has tokens of its own: ids {added[0].id} to {added[-1].id}"] = None
    if 0 < vocabulary.size < base.vocab_size:
        notices[
            f"has {vocabulary.size} tokens, and the base {base.vocab_size}: requests with the others are refused"
        ] = None
    if invocation:
        notices[f"acts only after its invocation tokens {show(list(invocation))}, which every prompt must have"] = None
    if heads:
        notices[f"holds {len(heads)} Medusa heads, which draft its answers"] = None
    of_lora = tuple(place for place in places.values() if place.part in (A, B))
    if not of_lora:
        problems.add("no_modules", FILE, "holds LoRA of no linear module of this base; without any, nothing is served")
    return MatchedTensors(
        tuple(modules), saved, groups, of_lora, tuple(notices), heads, rows, vocabulary.size, added, invocation
    )


def _check_activated(tokens: tuple[int, ...], has_more: bool, base: BaseShapes, problems: ProblemList) -> None:
    """Refuse parts of an aLoRA that act before its invocation tokens, too, and tokens that the base does not have."""
    field = "alora_invocation_tokens"
    if base.vocab_size and max(tokens) >= base.vocab_size:
        problems.add(f"invalid_{field}", field, f"has token {max(tokens)}; this base has {base.vocab_size} tokens")
    if has_more:
        problems.add(
            f"unsupported_{field}",
            field,
            "does not go with biases, norms, rows of the vocabulary or tokens of the adapter's own: PEFT applies these "
            "before the invocation tokens, too. Train linears only, or save it with save_embedding_layers=False",
        )


def is_adapted(parts: Parts) -> bool:
    """Return whether a module of the base has LoRA tensors, complete or not."""
    return not parts.keys().isdisjoint((A, B, MAGNITUDE, B_BIAS))


def _groups(places: Mapping[str, TensorPlace], base: BaseShapes, problems: ProblemList) -> dict[Site, dict[str, str]]:
    """Return the tensors' names by (layer, module), then by part."""
    if len(names := sorted({place.name.adapter_name for place in places.values() if place.part in (A, B)})) > 1:
        shown = ", ".join(show(name) for name in names[:3])
        problems.add("several_adapters", FILE, f"holds tensors of several adapters ({shown}); save each by itself")
    groups: dict[Site, dict[str, str]] = {}
    for name, place in places.items():
        other = groups.setdefault((place.layer, place.module), {}).setdefault(place.part, name)
        if other != name:
            at = module_name(base, place.layer, place.module)
            what = f"lora_{place.part}" if place.part in (A, B) else place.part
            problems.add("duplicate_module", at, f"has two tensors for {what}: {show(other)}, {show(name)}")
    return groups


def _group_size(module: str, a: TensorInfo, base: BaseShapes, config: AdapterConfig | None) -> int:
    """Return how many inputs a column of lora_A is for: PEFT pools those of GPTQ layers only."""
    if config is None or module == base.embedding or a.shape[1:] != (base.widths(module)[0] / config.group_size,):
        return 1
    return config.group_size


def _check_shapes(
    place: TensorPlace, a: TensorInfo, b: TensorInfo, base: BaseShapes, group_size: int, problems: ProblemList
) -> int | None:
    """Return the rank if A is [rank, in / group_size] and B is [out, rank] for this module."""
    n_in, n_out = base.widths(place.module)
    columns = n_in // group_size
    if len(a.shape) == len(b.shape) == 2 and (a.shape[1], b.shape[0]) == (columns, n_out) and a.shape[0] == b.shape[1]:
        return a.shape[0]
    hint = _RESIZED if place.module in base.ends else _shape_hint(a.shape, b.shape, n_in, n_out)
    message = (
        f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}; {place.module} of this base takes lora_A [rank, {n_in}]"
        f" and lora_B [{n_out}, rank]{hint}"
    )
    problems.add("shape_mismatch", module_name(base, place.layer, place.module), message)
    return None


def _shape_hint(a: tuple[int, ...], b: tuple[int, ...], n_in: int, n_out: int) -> str:
    if a[:1] == (n_in,) and b[-1:] == (n_out,):
        return f". They look transposed: if MLX saved them, {MLX_REMEDY}"
    if a[:1] == (n_out,) and b[-1:] == (n_in,):
        return ". They look swapped: rename lora_A and lora_B"
    return ". The adapter was trained on another base"


def _check_rank(
    place: TensorPlace,
    rank: int,
    base: BaseShapes,
    adapter_config: AdapterConfig | None,
    max_rank: int,
    factor: float,
    problems: ProblemList,
) -> float:
    """Return the module's scaling, times `factor`; record an infinite one, and a rank above the limit or unlike the
    config's."""
    name, *other_spelling = spellings(place, base)
    if rank > max_rank:
        remedy = f"no server takes more than {MAX_LORA_RANK}: train a lower rank"
        if rank <= MAX_LORA_RANK:
            remedy = f"serve --max-lora-rank {rank}"
        problems.add("rank_too_large", name, f"rank {rank}; this server takes at most {max_rank} ({remedy})")
    if adapter_config is None:
        return 1.0
    if adapter_config.rank(name) != rank:
        problems.add(
            "rank_mismatch",
            name,
            f"tensors have rank {rank}, the config says {adapter_config.rank(name)} (r={adapter_config.r} and "
            "rank_pattern); upload the config that was saved with these weights",
        )
        return 1.0
    scaling = adapter_config.scaling(name) * factor
    if any((adapter_config.rank(n), adapter_config.scaling(n) * factor) != (rank, scaling) for n in other_spelling):
        problems.add(
            "ambiguous_names",
            name,
            "rank_pattern or alpha_pattern mean another value for the name as it is in the file, with its wrappers; "
            "save the adapter with plain names",
        )
    if not math.isfinite(scaling) or abs(scaling) > MAX_FLOAT32:
        problems.add("invalid_alpha", name, f"scaling {scaling} does not fit float32; correct lora_alpha")
        return 1.0
    return scaling


def make_spec(matched: MatchedTensors, header: SafetensorsHeader, weights_digest: str, stored: Form) -> AdapterSpec:
    """Return the spec of validated tensors, with its key."""
    dtypes = {header.tensors[name].dtype for m in matched.modules for name in (m.a_name, m.b_name)}
    return AdapterSpec(
        key=adapter_key(
            matched.modules, weights_digest, stored, matched.rows, matched.added_tokens, matched.invocation_tokens
        ),
        weights_digest=weights_digest,
        modules=matched.modules,
        dtype=dtypes.pop() if len(dtypes) == 1 else "F32",
        weights_bytes=header.data_bytes,
        stored=stored,
        heads=matched.heads,
        saved=matched.saved,
        rows=matched.rows,
        vocab_size=matched.vocab_size,
        added_tokens=matched.added_tokens,
        invocation_tokens=matched.invocation_tokens,
    )


def adapter_key(
    modules: tuple[LoraModule, ...],
    weights_digest: str,
    stored: Form,
    rows: tuple[VocabRows, ...] = (),
    added_tokens: tuple[AddedToken, ...] = (),
    invocation_tokens: tuple[int, ...] = (),
) -> AdapterKey:
    """Return the SHA-256 over the resolved config, the weights' digest, the form unless it is "bf16", and the
    vocabulary rows, added tokens and invocation tokens, if any.

    Configs of equal meaning have one key: r, lora_alpha, use_rslora and both patterns act only through each module's
    rank and scaling, modules_to_save and trainable_token_indices only through the rows, and every other field has no
    effect or is refused. The scaling is written as an exact hexadecimal float.
    """
    resolved = [[m.layer, m.module, m.rank, float(m.scaling).hex()] for m in modules]
    form = {} if stored == BF16 else {"stored": stored}
    own = {"rows": [[r.module, r.name, r.token_ids, r.frozen] for r in rows]} if rows else {}
    tokens = {"added_tokens": [astuple(token) for token in added_tokens]} if added_tokens else {}
    start = {"alora_invocation_tokens": invocation_tokens} if invocation_tokens else {}
    content = {"format": KEY_FORMAT, "modules": resolved, "weights": weights_digest, **form, **own, **tokens, **start}
    return AdapterKey(hashlib.sha256(canonical_json(content).encode()).hexdigest())
