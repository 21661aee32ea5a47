"""Resolve options of `serve` by precedence: flags, environment, configuration file, defaults.

`ServerSettings` validates values. This module records where each value was given, for `lorasrv config show` and for
error messages, which name the flag, the variable, or the file and its key.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr, ValidationError

from adapter_store.registry.near_names import near_names
from api.config.file import ENVIRONMENT, ConfigFile, check_keys, find, read
from api.config.option_spec import flag
from api.config.settings import OPTIONS, SPELLINGS, ServerSettings
from lorasrv.errors import ConfigError

PREFIX = "LORASRV_"
FIELDS = tuple(OPTIONS)
# Known variables that are not options of `serve`; those of tests are ignored.
_OTHERS = ("SERVER", "TRACEBACK", ENVIRONMENT.removeprefix(PREFIX))
_TESTS = "TEST_"
# Matches flags of this command. Text in backticks is a whole command, whose flags stay as they are.
_FLAG = re.compile(r"`[^`]*`|--([a-z][a-z0-9-]*)")
_KINDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = (("ge", "at least {}"), ("gt", "above {}"), ("le", "at most {}"), ("lt", "below {}"))
OriginKind = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Name the source of a value."""

    kind: OriginKind
    # Flag, variable, or path of the file.
    name: str


@dataclass(frozen=True, slots=True)
class _Given:
    """Hold a value as it was given."""

    value: Any
    origin: Origin
    # Spelling as a flag, a variable or a key of the file.
    spelled: str


@dataclass(frozen=True, slots=True)
class Sources:
    """Hold the values from flags, environment and file."""

    file: ConfigFile | None = None
    _given: Mapping[str, _Given] = field(default_factory=dict)

    @classmethod
    def gather(cls, flags: Mapping[str, Any] | None = None, path: Path | None = None) -> "Sources":
        """Read all sources.

        Args:
            flags: values of flags by their names with underscores.
            path: the configuration file; None: the one that `find` returns.
        Raises:
            ConfigError: the file cannot be read or has an unknown key, or a source has an option under two names.
        """
        found = find(path)
        file = None if found is None else read(found)
        if file is not None:
            check_keys(file.path, file.serve, SPELLINGS)
        variables = {
            name.removeprefix(PREFIX).lower(): value for name, value in _variables().items() if name.startswith(PREFIX)
        }
        named = {name: value for name, value in variables.items() if name in SPELLINGS}
        given = {} if file is None else _by_option(file.serve, "file", str(file.path))
        return cls(file, given | _by_option(named, "environment") | _by_option(flags or {}, "flag"))

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> "Sources":
        """Use flags alone, without environment and file.

        Raises:
            ConfigError: an option has two names in them.
        """
        return cls(None, _by_option(flags, "flag"))

    def origin(self, name: str) -> Origin:
        """Return the source of an option's value."""
        return self._given[name].origin if name in self._given else Origin("default", "")

    def settings(self) -> ServerSettings:
        """Build and validate the settings.

        Raises:
            ConfigError: a value is wrong; the error names its source and the allowed values in one line.
        """
        wrong = [_not_a_switch(name, given) for name, given in self._given.items() if given.origin.kind == "file"]
        if complaints := [f"{self._place(name)}: {text}" for name, text in filter(None, wrong)]:
            raise ConfigError("; ".join(complaints))
        try:
            settings = ServerSettings(**{name: given.value for name, given in self._given.items()})
            settings.engine_config()
        except ValidationError as error:
            raise ConfigError(self._complaints(error)) from None
        except ConfigError as error:
            raise ConfigError(self.reworded(str(error))) from None
        return settings

    def reworded(self, message: str) -> str:
        """Replace flags in a message by the spelling (flag, variable or key) in which each option was given."""
        named = [self._given.get(_option(name)) for name in _FLAG.findall(message)]
        message = _FLAG.sub(lambda found: self._spelled(_option(found[1] or ""), found[0]), message)
        from_file = any(given is not None and given.origin.kind == "file" for given in named)
        return f"{self.file.path}: {message}" if from_file and self.file is not None else message

    def _spelled(self, name: str, otherwise: str) -> str:
        return self._given[name].spelled if name in self._given else otherwise

    def _place(self, name: str) -> str:
        spelled = self._spelled(name, flag(name))
        origin = self.origin(name)
        return f"{origin.name}: {spelled}" if origin.kind == "file" else spelled

    def _complaints(self, error: ValidationError) -> str:
        lines = []
        for problem in error.errors():
            message = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:
                lines.append(self.reworded(message))
                continue
            name = str(problem["loc"][0])
            if problem["type"] not in ("value_error", "extra_forbidden"):
                given = "the given value" if name in FIELDS and is_secret(name) else _shown(problem["input"])
                message = f"{given} is not allowed; expected {expected(name)}"
            lines.append(f"{self._place(name)}: {message}")
        return "; ".join(lines)


def unknown_variables() -> list[str]:
    """Return a warning for each LORASRV_ variable that is not an option; it is probably misspelled."""
    known = [PREFIX + name for name in (*(spelling.upper() for spelling in SPELLINGS), *_OTHERS)]
    lines = []
    for name in sorted(_variables()):
        if name.startswith(PREFIX) and name not in known and not name.startswith(PREFIX + _TESTS):
            near = near_names(name, {other.lower(): other for other in known})
            hint = f"; did you mean {near[0].upper()}?" if near else ""
            lines.append(f"{name} is set in the environment, but is not an option{hint}")
    return lines


def expected(name: str) -> str:
    """Describe the values that an option takes."""
    if allowed := choices(name):
        return f"one of {', '.join(allowed)}"
    if example := OPTIONS[name].example:
        return f"a {OPTIONS[name].metavar} such as {example}"
    field = ServerSettings.model_fields[name]
    # Pydantic moves metadata of Annotated[...] to the field, but not from `Annotated[...] | None`.
    kinds, bounds = _parts(field.annotation)
    found = [*field.metadata, *bounds]
    texts = [text.format(getattr(part, at)) for at, text in _BOUNDS for part in found if hasattr(part, at)]
    kind = next((_kind(kind) for kind in kinds if kind is not type(None)), "a value")
    return f"{kind}{', ' if texts else ''}{' and '.join(texts)}"


def is_secret(name: str) -> bool:
    """Return whether an option's value must not be shown."""
    return SecretStr in option_types(name) or not ServerSettings.model_fields[name].repr


def choices(name: str) -> tuple[str, ...]:
    """Return the values that an option may have, if they are few and known."""
    of_type = [value for kind in option_types(name) if get_origin(kind) is Literal for value in get_args(kind)]
    return OPTIONS[name].choices or tuple(of_type)


def option_types(name: str) -> list[Any]:
    """Return the types that an option's value may have."""
    return _parts(ServerSettings.model_fields[name].annotation)[0]


def _by_option(said: Mapping[str, Any], kind: OriginKind, path: str = "") -> dict[str, _Given]:
    """Map one source's values to options.

    Raises:
        ConfigError: the source has an option under two names; the message names both.
    """
    found: dict[str, _Given] = {}
    for spelling, value in said.items():
        spelled = {"flag": flag(spelling), "environment": PREFIX + spelling.upper()}.get(kind, spelling)
        name = SPELLINGS.get(spelling, spelling)
        if name in found:
            place = f"{path}: " if path else ""
            raise ConfigError(f"{place}{found[name].spelled} and {spelled} are the same option; give one of them")
        found[name] = _Given(value, Origin(kind, path or spelled), spelled)
    return found


def _option(flag_name: str) -> str:
    """Return the option of a flag without its leading hyphens."""
    name = flag_name.replace("-", "_")
    return SPELLINGS.get(name, name)


def _kind(kind: Any) -> str:
    if kind is SecretStr:
        return "text"
    if kind is ByteSize:
        return "a size: 512MiB, 2GB or bytes"
    if kind is Path:
        return "a path"
    return _KINDS.get(kind, "a list of strings")


def _parts(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Return the types that an annotation allows, and what Annotated adds to them."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_parts(part) for part in get_args(annotation)]
        return [kind for kinds, _ in parts for kind in kinds], [bound for _, bounds in parts for bound in bounds]
    if hasattr(annotation, "__metadata__"):
        # Pydantic's Field holds its bounds in its own `metadata`.
        return _parts(annotation.__origin__)[0], [
            bound for part in annotation.__metadata__ for bound in getattr(part, "metadata", [part])
        ]
    return [annotation], []


def _not_a_switch(name: str, given: _Given) -> tuple[str, str] | None:
    """Refuse TOML's true for a number, though it is Python's 1."""
    if not isinstance(given.value, bool) or bool in option_types(name):
        return None
    return name, f"{_shown(given.value)} is not allowed; expected {expected(name)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _variables() -> dict[str, str]:
    """Return the non-empty variables of the environment, with names in upper case."""
    return {name.upper(): value for name, value in os.environ.items() if value}
