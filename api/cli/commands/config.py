"""Show the options in effect and their sources (config show), and write a template (config init)."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import typer

from api.cli.common.options import ConfigOption, JsonOption
from api.cli.common.settings_options import described, given_settings
from api.cli.common.terminal import note, print_json, print_table, say

if TYPE_CHECKING:
    from api.config.sources import Origin, Sources

SECRET = "********"
app = typer.Typer(help="Show options of serve and of clients, and where they were set.", no_args_is_help=True)


def show(
    ctx: typer.Context,
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- FLAGS", help="Flags of serve, after --.")] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value was set.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every option and its value as lorasrv serve would use it: flags, then environment, then file, then defaults.

    Secrets are masked.
    """
    from api.config.sources import FIELDS, Sources, is_secret, unknown_variables

    for line in unknown_variables():
        note(f"warning: {line}")
    of_serve = _parsed(ctx, flags or [])
    sources = Sources.gather(given_settings(of_serve), config or of_serve.params["config"])
    settings = sources.settings()
    shown = {name: _plain(getattr(settings, name), secret=is_secret(name)) for name in FIELDS}
    origins = {name: sources.origin(name) for name in FIELDS}
    for name, value, source in _client(sources):
        shown[name], origins[name] = value, source
    if as_json:
        print_json({name: _with_origin(value, origins[name]) if origin else value for name, value in shown.items()})
        return
    rows = [(name, _text(value), *([_origin_text(origins[name])] if origin else [])) for name, value in shown.items()]
    print_table(("option", "value", *(["from"] if origin else [])), rows, numbers=False)


def init(as_json: JsonOption = False) -> None:
    """Print a configuration file with every option commented out: its help, default and allowed values."""
    if as_json:
        from api.config.sources import FIELDS, expected

        print_json({name: {"default": _plain(_default(name)), "expected": expected(name)} for name in FIELDS})
        return
    for line in _file_lines():
        say(line)


# Options in effect.
def _parsed(ctx: typer.Context, flags: list[str]) -> typer.Context:
    """Parse flags of `serve` with its own parser."""
    root: Any = ctx.find_root()
    serve = root.command.get_command(root, "serve")
    context: typer.Context = serve.make_context("serve", list(flags), parent=root)
    return context


def _client(sources: "Sources") -> Iterator[tuple[str, Any, "Origin"]]:
    """Yield the options of clients: the server and the API key."""
    import os

    from api.asgi.address import DEFAULT_SERVER
    from api.config.sources import PREFIX, Origin

    in_file = {} if sources.file is None else sources.file.client
    for key, default in (("server", DEFAULT_SERVER), ("api_key", None)):
        variable = PREFIX + key.upper()
        if os.environ.get(variable):
            value, origin = os.environ[variable], Origin("environment", variable)
        elif sources.file is not None and key in in_file:
            value, origin = in_file[key], Origin("file", str(sources.file.path))
        else:
            value, origin = default or "", Origin("default", "")
        yield f"client.{key}", _plain(value or None, secret=key == "api_key"), origin


def _plain(value: Any, *, secret: bool = False) -> Any:
    """Convert a value to types that JSON and TOML can represent."""
    if secret:
        return SECRET if value else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "base_model_name"):
        return f"{value.name}={value.path}"
    if isinstance(value, str):
        return _without_password(value)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _without_password(text: str) -> str:
    parts = urlsplit(text) if "://" in text else None
    if parts is None or parts.password is None:
        return text
    return urlunsplit(parts._replace(netloc=f"{parts.username}:{SECRET}@{parts.netloc.rpartition('@')[2]}"))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _origin_text(origin: "Origin") -> str:
    return f"{origin.kind} {origin.name}".strip()


def _with_origin(value: Any, origin: "Origin") -> dict[str, Any]:
    return {"value": value, "origin": origin.kind, "from": origin.name or None}


# Template of a configuration file.
def _file_lines() -> Iterator[str]:
    from api.config.settings import OPTIONS
    from api.config.sources import expected

    yield "# Configuration of lorasrv: remove the # from options to change."
    yield "# Flags and LORASRV_NAME in the environment override this file."
    panel = ""
    for name, option in OPTIONS.items():
        if option.panel != panel:
            panel = option.panel
            yield ""
            yield f"# {panel}"
        yield ""
        yield f"# {described(name)}"
        default = _plain(_default(name))
        yield f"# {name} = {_toml(default)}" if default is not None else f"# {name} = ... ({expected(name)})"
    yield ""
    yield "# Server and API key of client commands. Keep this file private if it contains a key."
    yield "[client]"
    yield '# server = "http://127.0.0.1:8000"'
    yield "# api_key = ... (text)"


def _default(name: str) -> Any:
    from api.config.settings import ServerSettings

    return ServerSettings.model_fields[name].get_default(call_default_factory=True)


def _toml(value: Any) -> str:
    """Format a value as TOML; JSON strings, lists, numbers and booleans are valid TOML."""
    return json.dumps(value, ensure_ascii=False)
