"""Where options of `serve` come from: flags before the environment before the configuration file before defaults.

`ServerSettings` says what a value may be; here is who said it, for `lorasrv config show` and for complaints, which
name the flag, the variable, or the file and its key.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr, ValidationError

from adapter_store.registry.near_names import near_names
from api.config.file import ENVIRONMENT, ConfigFile, check_keys, find, read
from api.config.settings import ServerSettings
from lorasrv.config import DEVICES, DTYPES, KERNELS, LOAD_FORMATS, POLICIES, PREEMPTIONS
from lorasrv.errors import ConfigError
from sgmv_kernels.formats.kv_format import KV_FORMATS

PREFIX = "LORASRV_"
FIELDS = tuple(ServerSettings.model_fields)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "kv_dtype": ("auto", *KV_FORMATS),
    "device": DEVICES,
    "kernels": KERNELS,
    "load_format": LOAD_FORMATS,
    "preemption": PREEMPTIONS,
    "policy": POLICIES,
}
# Variables that are no option of `serve`; those of tests go by.
_OTHERS = ("SERVER", "TRACEBACK", ENVIRONMENT.removeprefix(PREFIX))
_TESTS = "TEST_"
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_KINDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_BOUNDS = (("ge", "at least {}"), ("gt", "above {}"), ("le", "at most {}"), ("lt", "below {}"))
OriginKind = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who said a value; `name` is how it is spelled there."""

    kind: OriginKind
    name: str


@dataclass(frozen=True, slots=True)
class Sources:
    """What flags, environment and file say, and so where each option is from."""

    flags: Mapping[str, Any]
    file: ConfigFile | None

    @classmethod
    def gather(cls, flags: Mapping[str, Any] | None = None, path: Path | None = None) -> "Sources":
        """Raises: ConfigError: the file cannot be read, or holds an unknown key."""
        found = find(path)
        file = None if found is None else read(found)
        if file is not None:
            check_keys(file.path, file.serve, FIELDS)
        return cls(flags or {}, file)

    def origin(self, name: str) -> Origin:
        """Of one option, by its field's name."""
        if name in self.flags:
            return Origin("flag", _flag(name))
        if PREFIX + name.upper() in _variables():
            return Origin("environment", PREFIX + name.upper())
        if self.file is not None and name in self.file.serve:
            return Origin("file", str(self.file.path))
        return Origin("default", "")

    def settings(self) -> ServerSettings:
        """All of it together.

        Raises:
            ConfigError: a value is wrong: one line with who said it and what is allowed.
        """
        said = {} if self.file is None else self.file.serve
        of_file = {name: value for name, value in said.items() if self.origin(name).kind == "file"}
        wrong = [_not_a_switch(name, value) for name, value in of_file.items() if isinstance(value, bool)]
        if complaints := [f"{self._place(name)}: {text}" for name, text in filter(None, wrong)]:
            raise ConfigError("; ".join(complaints))
        try:
            settings = ServerSettings(**{**of_file, **self.flags})
            settings.engine_config()
        except ValidationError as error:
            raise ConfigError(self._complaints(error)) from None
        except ConfigError as error:
            raise ConfigError(self.reworded(str(error))) from None
        return settings

    def reworded(self, message: str) -> str:
        """A complaint that names flags, as one that names what was given in their place."""
        names = [flag.replace("-", "_") for flag in _FLAG.findall(message)]
        message = _FLAG.sub(lambda found: self._spelled(found[1].replace("-", "_"), found[0]), message)
        from_file = any(name in FIELDS and self.origin(name).kind == "file" for name in names)
        return f"{self.file.path}: {message}" if from_file and self.file is not None else message

    def _spelled(self, name: str, flag: str) -> str:
        origin = self.origin(name) if name in FIELDS else None
        if origin is None:
            return flag
        return {"file": name, "environment": origin.name}.get(origin.kind, flag)

    def _place(self, name: str) -> str:
        origin = self.origin(name)
        return f"{origin.name}: {name}" if origin.kind == "file" else origin.name or _flag(name)

    def _complaints(self, error: ValidationError) -> str:
        lines = []
        for problem in error.errors():
            message = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:
                lines.append(self.reworded(message))
                continue
            name = str(problem["loc"][0])
            if problem["type"] not in ("value_error", "extra_forbidden"):
                given = "what is given" if name in FIELDS and is_secret(name) else _shown(problem["input"])
                message = f"{given} is not allowed; expected {expected(name)}"
            lines.append(f"{self._place(name)}: {message}")
        return "; ".join(lines)


def unknown_variables() -> list[str]:
    """A line for each LORASRV_ variable that nothing reads: most likely it is misspelled."""
    known = [PREFIX + name for name in (*(field.upper() for field in FIELDS), *_OTHERS)]
    lines = []
    for name in sorted(_variables()):
        if name.startswith(PREFIX) and name not in known and not name.startswith(PREFIX + _TESTS):
            near = near_names(name, {other.lower(): other for other in known})
            hint = f"; did you mean {near[0].upper()}?" if near else ""
            lines.append(f"{name} is in the environment, and nothing reads it{hint}")
    return lines


def expected(name: str) -> str:
    """What an option takes, for people."""
    if name in CHOICES:
        return f"one of {', '.join(CHOICES[name])}"
    field = ServerSettings.model_fields[name]
    # Pydantic lifts what stands in Annotated[...] to the field, but not out of `Annotated[...] | None`.
    kinds, bounds = _parts(field.annotation)
    found = [*field.metadata, *bounds]
    texts = [text.format(getattr(part, at)) for at, text in _BOUNDS for part in found if hasattr(part, at)]
    kind = next((_kind(kind) for kind in kinds if kind is not type(None)), "a value")
    return f"{kind}{', ' if texts else ''}{' and '.join(texts)}"


def is_secret(name: str) -> bool:
    """Whether an option's value must not be shown."""
    return SecretStr in _parts(ServerSettings.model_fields[name].annotation)[0]


def _kind(kind: Any) -> str:
    if kind is SecretStr:
        return "a text"
    if kind is ByteSize:
        return "a size: 512MiB, 2GB or bytes"
    if kind is Path:
        return "a path"
    return _KINDS.get(kind, "a list of texts")


def _parts(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The types that an annotation allows, and what Annotated adds to them."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_parts(part) for part in get_args(annotation)]
        return [kind for kinds, _ in parts for kind in kinds], [bound for _, bounds in parts for bound in bounds]
    if hasattr(annotation, "__metadata__"):
        return _parts(annotation.__origin__)[0], list(annotation.__metadata__)
    return [annotation], []


def _not_a_switch(name: str, value: bool) -> tuple[str, str] | None:
    """TOML's true is no number, though it is Python's 1."""
    if bool in _parts(ServerSettings.model_fields[name].annotation)[0]:
        return None
    return name, f"{_shown(value)} is not allowed; expected {expected(name)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variables() -> set[str]:
    """Names of the environment that say something, as pydantic-settings sees them: in any case."""
    return {name.upper() for name, value in os.environ.items() if value}
