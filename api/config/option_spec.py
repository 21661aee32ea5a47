"""Option spec: how an option of the server is spelled and described, declared beside its field."""

from dataclasses import dataclass


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
    # Placeholder of the value; by default from the type and the unit in the name.
    metavar: str = ""
    # Older names, accepted wherever the field's name is.
    aliases: tuple[str, ...] = ()
    # Allowed values, if the type does not list them.
    choices: tuple[str, ...] = ()
    # Path in EngineConfig, if its last part is not the field's name.
    engine: str = ""
    # Whether the flag takes text, because words are allowed besides numbers.
    takes_text: bool = False
