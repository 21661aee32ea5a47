"""Tensors of an adapter beside lora_A and lora_B: DoRA's magnitudes, biases, and fully trained norms.

PEFT loads the tensors that fit the model and skips the others with a warning. Here a tensor that does not fit is a
problem, and so is a missing tensor that the config promises.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from adapter_store.errors import ProblemList, show
from adapter_store.formats.adapter_config import AdapterConfig
from adapter_store.formats.safetensors_file import SafetensorsHeader
from adapter_store.formats.tensor_names import B_BIAS, BASE_BIAS, BIAS, MAGNITUDE, WEIGHT, A, B, module_name
from adapter_store.spec import BaseShapes, LoraModule, SavedTensor, VocabRows
from adapter_store.validation.target_modules import OUTSIDE_LAYERS, ties_copies, ties_lora
from adapter_store.validation.tensor_scan import are_equal, read_matrix

Parts = Mapping[str, str]
"""The tensors of one module: part -> name of the tensor."""
Site = tuple[int, str]
_NOT_TIED = (
    "= true ties the {} of lm_head to the embedding's, and the file has {}; set it to false if they were trained "
    "untied, or save it again"
)


def check_lora_extras(
    site: Site,
    parts: Parts,
    header: SafetensorsHeader,
    base: BaseShapes,
    config: AdapterConfig | None,
    problems: ProblemList,
) -> dict[str, str | None]:
    """Return the tensors beside A and B of one adapted module, as fields of `LoraModule`; the embedding and the head
    cannot have any.
    """
    at, width = module_name(base, *site), base.widths(site[1])[1]
    found: dict[str, str | None] = {}
    for part, field, option in ((MAGNITUDE, "magnitude", "use_dora"), (B_BIAS, "b_bias", "lora_bias")):
        name = found[field] = parts.get(part)
        what = "lora_magnitude_vector" if part == MAGNITUDE else "lora_B.bias"
        if name is not None and at in base.ends:
            message = f"has a {what}; outside the layers {option} is not served. Train again without {at}"
            problems.add("unsupported_embedding", at, message)
            continue
        if name is not None:
            _check_width(name, at, width, header, problems)
        if config is not None and getattr(config, option) != (name is not None):
            says = f"has no {what}, but the config says {option}=true" if name is None else f"has a {what}"
            fix = "save the adapter again" if name is None else f"set {option} to true if it was trained so"
            problems.add(f"{option}_mismatch", at, f"{says}; {fix}")
    return found


def match_saved(
    groups: Mapping[Site, Parts],
    header: SafetensorsHeader,
    base: BaseShapes,
    config: AdapterConfig | None,
    problems: ProblemList,
) -> tuple[SavedTensor, ...]:
    """Return the tensors that replace the base's; record a problem for each that PEFT would leave out.

    Linears in modules_to_save are skipped: `check_promised` refuses them, whatever tensors they have.
    """
    saved = []
    inside = {site: parts for site, parts in groups.items() if site[1] not in base.ends}
    for (layer, module), parts in sorted(inside.items()):
        at = module_name(base, layer, module)
        if name := parts.get(WEIGHT):
            parameter = f"{at}.weight"
            width = base.norms.get(module, base.hidden_size)
            if config is not None and not any(at.endswith(own) for own in config.modules_to_save):
                message = "is not in modules_to_save, and PEFT would write it over the base's; name it there"
                problems.add("untargeted_modules", at, message)
        elif name := parts.get(BASE_BIAS) or parts.get(BIAS):
            if parts.keys() >= {BASE_BIAS, BIAS}:
                problems.add("duplicate_module", at, "has two tensors for its bias, bias and base_layer.bias")
            if config is not None and is_copied(at, config):
                continue
            width = base.modules[module][1]
            parameter = f"{at}.base_layer.bias" if A in parts or B in parts else f"{at}.bias"
            _check_bias(at, module, parameter, parts, base, config, problems)
        else:
            continue
        _check_width(name, at, width, header, problems)
        saved.append(SavedTensor(layer, module, name, parameter))
    return tuple(saved)


def check_tying(groups: Mapping[Site, Parts], base: BaseShapes, config: AdapterConfig, problems: ProblemList) -> None:
    """Record a problem if the head and the embedding share one LoRA and the file has it for only one of them. PEFT
    saves it for both: the head's A is the embedding's B, transposed.
    """
    adapted = {module for (_, module), parts in groups.items() if not parts.keys().isdisjoint((A, B))}
    if ties_lora(base, config) and len(adapted.intersection(base.ends)) == 1:
        problems.add(
            "unsupported_ensure_weight_tying", "ensure_weight_tying", _NOT_TIED.format("LoRA", "only one of them")
        )


def check_shared(
    file: BinaryIO,
    header: SafetensorsHeader,
    modules: Sequence[LoraModule],
    rows: Sequence[VocabRows],
    base: BaseShapes,
    config: AdapterConfig,
    problems: ProblemList,
) -> None:
    """Record a problem if the head and the embedding share one LoRA or copy and the file has two: PEFT loads one into
    both."""
    what, equal = "LoRA", True
    ends = sorted((own for own in modules if own.module in base.ends), key=lambda own: own.module == base.embedding)
    if ties_lora(base, config) and len(ends) == 2:
        head, embedding = ends
        same = (head.a_name, embedding.b_name), (head.b_name, embedding.a_name)
        matrices = ([read_matrix(file, header, name) for name in pair] for pair in same)
        equal = all(np.array_equal(one, other.T) for one, other in matrices)
    elif ties_copies(base, config):
        what, copies = "copy", [own.name for own in rows if own.token_ids is None and not own.frozen]
        equal = are_equal(file, header, copies)
    if not equal:
        problems.add("unsupported_ensure_weight_tying", "ensure_weight_tying", _NOT_TIED.format(what, "two"))


def check_promised(
    groups: Mapping[Site, Parts],
    base: BaseShapes,
    config: AdapterConfig,
    problems: ProblemList,
) -> None:
    """Record a problem for each module in modules_to_save that is neither a norm, the embedding nor the head, or that
    has no tensor. As in PEFT, an entry matches the end of a module's full name.

    PEFT fails on a named module without tensors, and applies no LoRA inside a named module.
    """
    if not config.modules_to_save:
        return
    saved = {module_name(base, *site) for site, parts in groups.items() if WEIGHT in parts}
    layers = range(base.num_layers)
    norms = [
        module_name(base, layer, norm) for layer in layers for norm in base.norms if (layer, norm) not in base.lacking
    ]
    linears = [module_name(base, layer, own) for layer in layers for own in base.modules]
    others = dict.fromkeys(part for name in (*norms, *linears) for part in _containers(name)) | dict.fromkeys(linears)
    for own in config.modules_to_save:
        if not own or not own.replace(".", "").replace("_", "").isalnum():
            problems.add("unsupported_modules_to_save", "modules_to_save", f"{show(own)} is no name of a module")
        elif inside := next((name for name in others if name.endswith(own)), None):
            message = (
                f"{show(own)} names {inside}; only norms, head and embedding are served so. Train again without it"
            )
            problems.add("unsupported_modules_to_save", "modules_to_save", message)
    whole = [name for name in (*norms, base.final_norm, *(base.ends or OUTSIDE_LAYERS)) if name]
    for own in config.modules_to_save:
        if hidden := next((name for name in whole if not name.endswith(own) and _ends_like(name, own)), None):
            message = f"{show(own)} is a pattern for PEFT, in which a dot is any letter, and names {hidden}; name that"
            problems.add("unsupported_modules_to_save", "modules_to_save", message)
    promised = [name for name in whole if name.endswith(config.modules_to_save)]
    if ties_copies(base, config):
        promised += [end for end in base.ends if end not in promised]
    if missing := [name for name in promised if name not in saved]:
        message = f"names {missing[0]}, and {len(missing)} such modules have no tensors; PEFT would not load it"
        problems.add("missing_saved_modules", "modules_to_save", message)


def is_copied(name: str, config: AdapterConfig) -> bool:
    """Return whether modules_to_save names a module or one that contains it: PEFT applies no LoRA to it."""
    return any(part.endswith(config.modules_to_save) for part in (name, *_containers(name)))


def _containers(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def missing_biases(groups: Mapping[Site, Parts], base: BaseShapes, config: AdapterConfig) -> Iterator[str]:
    """Yield the full names of biases that the config promises and the file lacks."""
    for layer in range(base.num_layers):
        for module in [own for own in sorted(base.biased) if (layer, own) not in base.lacking]:
            parts = groups.get((layer, module), {})
            is_trained = config.bias == "all" or (config.bias == "lora_only" and A in parts)
            if is_trained and not {BASE_BIAS, BIAS} & parts.keys():
                yield f"{module_name(base, layer, module)}.bias"


def notices_of(modules: tuple[LoraModule, ...], saved: tuple[SavedTensor, ...], base: BaseShapes) -> list[str]:
    """Return a notice for each kind of tensor that was read beside lora_A and lora_B."""
    norms = sum(tensor.module not in base.modules for tensor in saved)
    counts = {
        "DoRA's magnitudes of {} modules": sum(m.magnitude is not None for m in modules),
        "biases beside lora_B of {} modules": sum(m.b_bias is not None for m in modules),
        "lora_A of pooled inputs (QALoRA) of {} modules": sum(m.group_size > 1 for m in modules),
        "{} biases instead of the base's": len(saved) - norms,
        "{} norms instead of the base's": norms,
    }
    return [f"holds {what.format(count)}" for what, count in counts.items() if count]


def _check_bias(
    at: str,
    module: str,
    parameter: str,
    parts: Parts,
    base: BaseShapes,
    config: AdapterConfig | None,
    problems: ProblemList,
) -> None:
    if module not in base.biased:
        problems.add("unsupported_bias", at, "has a bias in the file, and none in this base")
    elif config is not None and config.bias == "none":
        problems.add("bias_mismatch", at, "has a bias, but the config says bias=none; set it to what was trained")
    elif parameter.endswith(".base_layer.bias") != (BASE_BIAS in parts):
        message = f"PEFT would not find its bias, it looks for {parameter}; save the adapter again"
        problems.add("bias_mismatch", at, message)


def _check_width(name: str, at: str, width: int, header: SafetensorsHeader, problems: ProblemList) -> None:
    if header.tensors[name].shape != (width,):
        shape = list(header.tensors[name].shape)
        problems.add("shape_mismatch", at, f"{name.rpartition(at)[2][1:]} is {shape}; this base takes [{width}]")


def _ends_like(name: str, pattern: str) -> bool:
    tail = name[-len(pattern) :]
    return len(tail) == len(pattern) and all(own in (".", letter) for own, letter in zip(pattern, tail, strict=True))
