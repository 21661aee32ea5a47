"""Tensors of an adapter beside lora_A and lora_B: DoRA's magnitudes, biases, and norms that were trained whole.

PEFT loads what the file has and the model has a place for, and leaves out the rest with a warning. Here a tensor that
has no place is a problem, and so is a place without the tensor that the config promises.
"""

from collections.abc import Collection, Iterator, Mapping

from adapter_store.errors import ProblemList
from adapter_store.formats.adapter_config import AdapterConfig
from adapter_store.formats.safetensors_file import SafetensorsHeader
from adapter_store.formats.tensor_names import B_BIAS, BASE_BIAS, BIAS, MAGNITUDE, WEIGHT, A, B, module_name
from adapter_store.spec import BaseShapes, LoraModule, SavedTensor
from adapter_store.validation.target_modules import OUTSIDE_LAYERS

Parts = Mapping[str, str]
"""Part -> name of the tensor, of one module."""
Site = tuple[int, str]


def check_lora_extras(
    site: Site,
    parts: Parts,
    header: SafetensorsHeader,
    base: BaseShapes,
    config: AdapterConfig | None,
    problems: ProblemList,
) -> dict[str, str | None]:
    """Return the tensors beside A and B of one adapted linear, as fields of `LoraModule`."""
    at, width = module_name(base, *site), base.modules[site[1]][1]
    found: dict[str, str | None] = {}
    for part, field, option in ((MAGNITUDE, "magnitude", "use_dora"), (B_BIAS, "b_bias", "lora_bias")):
        name = found[field] = parts.get(part)
        if name is not None:
            _check_width(name, at, width, header, problems)
        if config is not None and getattr(config, option) != (name is not None):
            what = "lora_magnitude_vector" if part == MAGNITUDE else "lora_B.bias"
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
    """Return the tensors that replace the base's; record a problem for each that PEFT would leave out."""
    saved = []
    for (layer, module), parts in sorted(groups.items()):
        at = module_name(base, layer, module)
        if name := parts.get(WEIGHT):
            parameter = f"{at}.weight"
            width = base.norms.get(module, base.hidden_size)
            if config is not None and not any(at.endswith(own) for own in config.modules_to_save):
                message = "is not in modules_to_save, so PEFT would leave its weight out; name it there"
                problems.add("untargeted_modules", at, message)
        elif name := parts.get(BASE_BIAS) or parts.get(BIAS):
            width = base.modules[module][1]
            parameter = f"{at}.base_layer.bias" if A in parts or B in parts else f"{at}.bias"
            _check_bias(at, module, parameter, parts, base, config, problems)
        else:
            continue
        _check_width(name, at, width, header, problems)
        saved.append(SavedTensor(layer, module, name, parameter))
    return tuple(saved)


def missing_saved(
    groups: Mapping[Site, Parts], base: BaseShapes, config: AdapterConfig, tensor_names: Collection[str]
) -> Iterator[str]:
    """Yield full names of norms, biases and modules outside the layers that the config promises and no tensor is for.

    Outside the layers, any tensor that contains the name counts: it is a problem of its own.
    """
    for name in OUTSIDE_LAYERS:
        is_there = any(f".{name}." in tensor for tensor in tensor_names)
        if not is_there and any(name.endswith(own) for own in config.modules_to_save):
            yield name
    for layer in range(base.num_layers):
        norms = {**base.norms, **({base.final_norm: 0} if layer == base.num_layers - 1 and base.final_norm else {})}
        for module in [norm for norm in norms if (layer, norm) not in base.lacking]:
            at = module_name(base, layer, module)
            if any(at.endswith(own) for own in config.modules_to_save) and WEIGHT not in groups.get(
                (layer, module), {}
            ):
                yield at
        for module in [own for own in sorted(base.biased) if (layer, own) not in base.lacking]:
            parts = groups.get((layer, module), {})
            is_trained = config.bias == "all" or (config.bias == "lora_only" and A in parts)
            if is_trained and not {BASE_BIAS, BIAS} & parts.keys():
                yield f"{module_name(base, layer, module)}.bias"


def notices_of(modules: tuple[LoraModule, ...], saved: tuple[SavedTensor, ...], base: BaseShapes) -> list[str]:
    """Return what was read beside lora_A and lora_B, in words."""
    norms = sum(tensor.module not in base.modules for tensor in saved)
    counts = {
        "DoRA's magnitudes of {} modules": sum(m.magnitude is not None for m in modules),
        "biases beside lora_B of {} modules": sum(m.b_bias is not None for m in modules),
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
