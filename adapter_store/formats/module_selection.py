"""Which modules a config adapts: `target_modules`, `exclude_modules`, `layers_to_transform` and `layers_pattern`.

PEFT accepts names or regular expressions (`check_target_module_exists`). If an expression cannot be evaluated here, the
selection is unknown, and only the tensors say which modules are adapted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adapter_store.errors import ProblemList, show
from adapter_store.formats.name_pattern import MAX_INSTRUCTIONS, Expression, layer_of, whole_name

ALL_LINEAR = "all-linear"
_ANY_LAYERS = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""PEFT's pattern for a layer's number, if `layers_pattern` is empty."""


@dataclass(frozen=True, slots=True)
class Modules:
    """Match module names by their end, or by an expression for the whole name."""

    names: tuple[str, ...] = ()
    expression: Expression | None = None

    def __contains__(self, module_name: str) -> bool:
        if self.expression is not None:
            return self.expression.matches(module_name)
        return any(module_name == name or module_name.endswith(f".{name}") for name in self.names)


NO_MODULES = Modules()


@dataclass(frozen=True, slots=True)
class ModuleSelection:
    """Hold the fields as PEFT means them. `layers` is None for all layers."""

    targets: Modules = NO_MODULES
    all_linear: bool = False
    excluded: Modules = NO_MODULES
    layers: frozenset[int] | None = None
    layer_patterns: tuple[Expression, ...] = ()
    unmatched: str = ""
    """The field whose expression cannot be evaluated here."""

    @property
    def is_known(self) -> bool:
        """Return whether the config says which modules are adapted."""
        return not self.unmatched and (self.all_linear or self.targets != NO_MODULES)

    @property
    def is_empty(self) -> bool:
        """Return whether the config names no module at all."""
        return not self.unmatched and not self.is_known

    def selects(self, module_name: str) -> bool:
        """Return whether PEFT would adapt this module, by its name in the base. False if the selection is unknown."""
        if not self.is_known or module_name in self.excluded:
            return False
        if self.all_linear:
            return _layer(module_name, ()) is not None
        if module_name in self.targets.names:
            return True
        in_layer = self.layers is None or _layer(module_name, self.layer_patterns) in self.layers
        return in_layer and module_name in self.targets


NO_SELECTION = ModuleSelection()


def read_selection(config: Mapping[str, object], problems: ProblemList, size: int) -> ModuleSelection:
    """Read the fields.

    Args:
        config: the parsed JSON.
        problems: receives a problem for each field of a type that PEFT does not accept.
        size: total size of the expressions read before; the total of all is limited.
    """
    reader = _Reader(config, problems, size)
    target = config.get("target_modules")
    all_linear = isinstance(target, str) and target.lower() == ALL_LINEAR
    targets = NO_MODULES if all_linear else reader.modules("target_modules")
    excluded = reader.modules("exclude_modules")
    layers = reader.layers("layers_to_transform")
    patterns = reader.layer_patterns("layers_pattern")
    return ModuleSelection(targets, all_linear, excluded, layers, patterns, reader.unmatched)


def strings(value: object) -> tuple[str, ...] | None:
    """Return the value if it is a list of texts, else None."""
    return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


class _Reader:
    def __init__(self, config: Mapping[str, object], problems: ProblemList, size: int) -> None:
        self.unmatched = ""
        self._config, self._problems, self._size = config, problems, size

    def modules(self, field: str) -> Modules:
        value = self._config.get(field)
        if isinstance(value, str) and value:
            return Modules(expression=self._expression(field, whole_name, value))
        return Modules(self._texts(field))

    def layers(self, field: str) -> frozenset[int] | None:
        value = self._config.get(field)
        if value is None or value == []:
            return None
        items = value if isinstance(value, list) else [value]
        layers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(layers) < len(items):
            what = f"= {show(value)}; it must be the number of a layer or a list of numbers"
            self._problems.add(f"invalid_{field}", field, what)
        return frozenset(layers)

    def layer_patterns(self, field: str) -> tuple[Expression, ...]:
        found = (self._expression(field, layer_of, pattern) for pattern in self._texts(field))
        return tuple(expression for expression in found if expression is not None)

    def _texts(self, field: str) -> tuple[str, ...]:
        value = self._config.get(field)
        texts = strings([value] if isinstance(value, str) and value else value or [])
        if texts is None:
            self._problems.add(f"invalid_{field}", field, f"= {show(value)}; it must be a text or a list of texts")
        return texts or ()

    def _expression(self, field: str, read: Callable[[str], Expression], text: str) -> Expression | None:
        try:
            expression = read(text)
        except ValueError:
            self.unmatched = field
            return None
        self._size += expression.size
        if self._size > MAX_INSTRUCTIONS:
            self.unmatched = field
        return expression


def _layer(module_name: str, patterns: tuple[Expression, ...]) -> int | None:
    if not patterns:
        found = _ANY_LAYERS.match(module_name)
        return int(found[1]) if found else None
    matching = next((pattern for pattern in patterns if pattern.matches(module_name)), None)
    number = matching.group(module_name) if matching is not None else None
    return int(number) if number is not None else None
