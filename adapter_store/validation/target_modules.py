"""Comparison of the modules that the config names with those that the file has tensors for.

PEFT adapts the modules that the config names and loads the tensors that fit: a named module without tensors keeps its
initial values, and tensors of an unnamed module are dropped with a warning. Here both are reported. If the config names
no modules, or selects them by an expression that is not evaluated here, no module can be missing.
"""

from collections.abc import Collection

from adapter_store.errors import ProblemList
from adapter_store.formats.adapter_config import AdapterConfig
from adapter_store.formats.module_selection import NO_MODULES, ModuleSelection
from adapter_store.formats.tensor_names import TensorPlace, module_name
from adapter_store.spec import BaseShapes

OUTSIDE_LAYERS = ("model.embed_tokens", "lm_head")
"""Modules outside the layers that a config can name; tensors for them are refused by name."""
_TIED_NAMES = ("embed_tokens", "lm_head")
"""Last parts of the names by which PEFT recognises that an adapter has one of two tied tables: not mpt's `wte`."""


def missing_modules(
    selection: ModuleSelection, base: BaseShapes, found: Collection[tuple[int, str]], tensor_names: Collection[str]
) -> tuple[str, ...]:
    """Return the full names of modules that the config names and that have no tensors, in the order of the layers.

    `found` holds the modules of the layers that have tensors; outside the layers, any LoRA tensor counts whose name
    contains the module's name.
    """
    named = {place: module_name(base, *place) for place in base.places() if place not in found}
    inside = [name for name in named.values() if selection.selects(name)]
    outside = [name for name in base.ends or OUTSIDE_LAYERS if selection.selects(name)]
    return (
        *inside,
        *(name for name in outside if not any(f".{name}.lora_" in f".{tensor}" for tensor in tensor_names)),
    )


def check_complete(missing: tuple[str, ...], num_expected: int, problems: ProblemList) -> None:
    """Record a problem if modules are missing."""
    if missing:
        problems.add(
            "partial_adapter",
            "target_modules",
            f"names {num_expected} modules of this base, and {len(missing)} have no tensors (first: {missing[0]}): "
            "they would stay as the base. Upload the whole adapter, or allow it: `lorasrv upload --allow-partial`, "
            '"allow_partial": true',
        )


def ties_copies(base: BaseShapes, config: AdapterConfig) -> bool:
    """Return whether PEFT shares one copy between the embedding and the head, whichever `modules_to_save` names."""
    is_named = any(name.rpartition(".")[2] in _TIED_NAMES for name in config.modules_to_save)
    return base.tied and config.ensure_weight_tying and is_named


def ties_lora(base: BaseShapes, config: AdapterConfig) -> bool:
    """Return whether PEFT shares one LoRA between both, or may do so: the targets may be unknown."""
    if not base.tied or not config.ensure_weight_tying or ties_copies(base, config):
        return False
    targets = config.selection.targets
    if targets.expression is not None:
        return any(map(targets.expression.matches, _TIED_NAMES))
    is_named = any(name.rpartition(".")[2] in _TIED_NAMES for name in targets.names)
    return is_named or (targets == NO_MODULES and bool(config.selection.unmatched))


def check_targeted(
    config: AdapterConfig, base: BaseShapes, places: Collection[TensorPlace], problems: ProblemList
) -> None:
    """Record a problem if there are tensors for modules that the config leaves out."""
    selection, tied = config.selection, tuple(base.ends) if ties_lora(base, config) else ()
    if not selection.is_known:
        return
    unnamed = {
        (place.layer, place.module)
        for place in places
        if not any(map(selection.selects, tied if place.module in tied else spellings(place, base)))
    }
    if unnamed:
        first = module_name(base, *min(unnamed))
        problems.add(
            "untargeted_modules",
            "target_modules",
            f"leaves out {len(unnamed)} modules that the file has tensors for (first: {first}): PEFT would drop them. "
            "Set target_modules, exclude_modules and layers_to_transform to what was trained",
        )


def spellings(place: TensorPlace, base: BaseShapes) -> tuple[str, ...]:
    """Return a module's name in the base, and its name in training with PEFT if that may differ."""
    plain, saved = module_name(base, place.layer, place.module), place.name.saved_module
    return (plain,) if saved in ("", plain) else (plain, saved)
