"""Generate command line options from `ServerSettings`, when a command that takes settings of `serve` first needs them.

Other commands start without them, and therefore without pydantic.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from api.cli.common.terminal import CliError, ExitCode

_META = "lorasrv.settings"
_POSITIONAL = "positional_"
_UNITS = ((r"_bytes(_|$)", "SIZE"), (r"_s$", "SECONDS"), (r"_ms$", "MS"))


def settings_command(*names: str, panel: str | None = None, positional: str = "") -> type[TyperCommand]:
    """Return a class of commands that take these settings as options, besides their own.

    Args:
        names: names of the settings; empty: all of them.
        panel: heading of the options in the help, instead of each setting's own.
        positional: setting that may also be given without its flag.
    """

    class SettingsCommand(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            return [*super().get_params(ctx), *_options(names, panel, positional, ctx.resilient_parsing)]

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            rest = super().parse_args(ctx, args)
            generated = [option.name for option in _options(names, panel, positional, ctx.resilient_parsing)]
            ctx.meta[_META] = {name: ctx.params.pop(name, None) for name in generated}
            return rest

    return SettingsCommand


def given_settings(ctx: typer.Context) -> dict[str, Any]:
    """Return the settings that were given by flags, under the names that were used.

    Raises:
        CliError: a switch is given both ways, or a setting with and without its flag.
    """
    return _given(ctx.meta[_META])


def described(name: str) -> str:
    """Return the help of a setting with its choices, as a sentence."""
    from api.config.settings import OPTIONS
    from api.config.sources import choices

    allowed = choices(name)
    listed = " or ".join(filter(None, (", ".join(allowed[:-1]), *allowed[-1:])))
    phrase, separator, note = OPTIONS[name].help.partition("; ")
    return f"{phrase}{': ' if listed else ''}{listed}{separator}{note}."


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in values.items():
        if value in (None, (), []):
            continue
        if (setting := name.removeprefix(_POSITIONAL)) != name:
            if values[setting] is not None:
                message = f"{value!r} and --{setting} {values[setting]!r} are the same option; give one of them"
                raise CliError(message, code=ExitCode.USAGE)
            name = setting
        opposite = name.removeprefix("no_")
        if opposite == name or name in given:
            given[name] = value
        elif given.get(opposite):
            flag = opposite.replace("_", "-")
            raise CliError(f"--{flag} and --no-{flag} exclude each other", code=ExitCode.USAGE)
        else:
            given[opposite] = False
    return given


@cache
def _options(names: tuple[str, ...], panel: str | None, positional: str, completes: bool) -> tuple[Any, ...]:
    """Return the command line's parameters for settings. Aliases are hidden, except for shell completion."""
    from api.config.settings import OPTIONS

    parameters = [part for name in names or OPTIONS for part in _parameters(name, panel, completes)]
    if positional:
        parameters.append(_argument(positional))

    def command() -> None:
        """Carry the parameters."""

    # typer reads the signature and the annotations.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    carrier = typer.Typer(add_completion=False)
    carrier.command()(command)
    return tuple(typer.main.get_command(carrier).params)


def _parameters(name: str, panel: str | None, completes: bool) -> Iterator[inspect.Parameter]:
    from api.config.settings import OPTIONS, ServerSettings
    from api.config.sources import option_types

    option, types = OPTIONS[name], option_types(name)
    shared = {"rich_help_panel": panel or option.panel, "show_default": False}
    if bool in types:
        is_on = bool(ServerSettings.model_fields[name].default)
        text = _escaped(described(name))
        off = f"Do not {text[0].lower()}{text[1:]}"
        # The help shows only the switch that changes the default.
        yield _parameter(name, bool, help=text, hidden=is_on, **shared)
        yield _parameter(f"no_{name}", bool, help=off, hidden=not is_on, **shared)
        return
    kind = _flag_type(name)
    given = kind if kind in (list[str], Path) else str
    shown = _escaped(f"{described(name)}{_aliases(option.aliases)}{_default(name)}")
    shared["metavar"] = option.metavar or _metavar(name, kind)
    yield _parameter(name, given, help=shown, **shared)
    for alias in option.aliases:
        yield _parameter(alias, given, help=f"Same as --{name.replace('_', '-')}.", hidden=not completes, **shared)


def _argument(name: str) -> inspect.Parameter:
    from api.config.settings import OPTIONS

    declared = Annotated[
        str | None, typer.Argument(metavar=OPTIONS[name].metavar, help=f"Same as --{name.replace('_', '-')}.")
    ]
    return inspect.Parameter(_POSITIONAL + name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=declared)


def _parameter(name: str, kind: Any, **options: Any) -> inspect.Parameter:
    declared = Annotated[kind | None, typer.Option(f"--{name.replace('_', '-')}", **options)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=declared)


def _flag_type(name: str) -> Any:
    """Return the type of a flag's value, for the help. Numbers are parsed by the settings, whose errors are clearer."""
    from api.config.settings import OPTIONS
    from api.config.sources import option_types

    types = option_types(name)
    if OPTIONS[name].takes_text:
        return str
    if any(getattr(kind, "__origin__", None) is tuple for kind in types):
        return list[str]
    return next((kind for kind in (int, float, Path) if kind in types), str)


def _metavar(name: str, kind: Any) -> str:
    unit = next((word for pattern, word in _UNITS if re.search(pattern, name)), "")
    return unit or {int: "N", float: "N", Path: "PATH"}.get(kind, "CHOICE")


def _default(name: str) -> str:
    """Return the help's note on an option's default."""
    from api.config.settings import OPTIONS, ServerSettings

    value = ServerSettings.model_fields[name].default
    text = OPTIONS[name].default
    if value is not None and not text and value != ():
        text = _shown(value)
    return f" [default: {text}]" if text else ""


def _shown(value: Any) -> str:
    from pydantic import ByteSize

    if isinstance(value, tuple):
        return ",".join(value)
    return (value.human_readable().replace(".0", "") if isinstance(value, ByteSize) else f"{value}").removesuffix(".0")


def _aliases(names: tuple[str, ...]) -> str:
    return f" Also --{', --'.join(name.replace('_', '-') for name in names)}." if names else ""


def _escaped(text: str) -> str:
    """Escape brackets, which would otherwise be markup."""
    return text.replace("[", r"\[")
