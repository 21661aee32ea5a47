"""Option spec: how an option of the server is spelled and described, declared beside its field."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """Describe the spelling, help and use of an option."""

    # One phrase without the full stop, and optionally a note after "; ". The help inserts choices after the phrase and
    # the default at the end.
    help: str
    # Heading of the option in the help.
    panel: str
    # Shown instead of the default's value.
    default: str = ""
    # Placeholder of the value; by default derived from the type and the unit in the name.
    metavar: str = ""
    # Sample value, shown in errors of options whose form does not follow from the type.
    example: str = ""
    # Older names, accepted wherever the field's name is.
    aliases: tuple[str, ...] = ()
    # Allowed values, if the type does not list them.
    choices: tuple[str, ...] = ()
    # Path in EngineConfig, if its last part is not the field's name.
    engine: str = ""
    # Whether the flag takes text, because words are allowed besides numbers.
    takes_text: bool = False


def option_specs(settings: type[BaseModel]) -> dict[str, OptionSpec]:
    """Return the declarations of a class's options by name."""
    return {
        name: next(part for part in field.metadata if isinstance(part, OptionSpec))
        for name, field in settings.model_fields.items()
    }


def flag(name: str) -> str:
    """Return the flag of an option's name."""
    return "--" + name.replace("_", "-")


def texts(value: object) -> object:
    """Split strings at commas, because one may hold several origins or names. Other values are returned unchanged."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(one.strip().rstrip("/") for part in parts for one in str(part).split(",") if one.strip())


def _not_negative(value: object) -> object:
    if str(value).strip().startswith("-"):
        raise ValueError(f"must not be negative, not {value}")
    return value


Size = Annotated[ByteSize, BeforeValidator(_not_negative)]
"""Number of bytes; accepts 512MiB or 2GB, too."""
