"""Options that several subcommands share, and the client that they give.

Adapter ids for a shell that completes a command: from the server, at once or not at all.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from api.asgi.address import DEFAULT_SERVER, is_loopback
from api.cli.common.terminal import CliError, ExitCode

if TYPE_CHECKING:
    from api.client import Client, Refused

ServerOption = Annotated[
    str,
    # The default is asked of the configuration file, by a function that help would show as it is.
    typer.Option(
        "--server", envvar="LORASRV_SERVER", metavar="URL", help="Where the server is.", show_default=DEFAULT_SERVER
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="LORASRV_API_KEY",
        metavar="KEY",
        help="What the server asks for, where it has keys.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="LORASRV_CONFIG",
        metavar="FILE",
        help=r"Options from a TOML file. \[default: ~/.config/lorasrv/config.toml, if it is there]",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output, one JSON value a line.")]
UNAUTHORIZED = 401
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LISTS = frozenset({"--lora-modules"})
# Its --server says where costs come from, and is not asked unless it is given.
_NO_SERVER = frozenset({"plan"})


class ServerDefaults(dict[str, Any]):
    """What typer takes where neither a flag nor the environment says anything: of every command the same server, that
    of the configuration file, which is read only if the question comes up."""

    def get(self, command: str, default: Any = None) -> Any:
        return {} if command in _NO_SERVER else {"server": partial(_client_option, "server", DEFAULT_SERVER)}


def _client_option(name: str, default: str | None = None) -> Any:
    from api.config.file import client_options

    return client_options().get(name, default)


def spread(arguments: Sequence[str]) -> list[str]:
    """Options that vLLM's command takes as lists, spelled as ours: `--flag a b` becomes `--flag a --flag b`."""
    given: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _LISTS else ""
            given.append(argument)
        else:
            given += [flag, argument] if flag and given[-1] != flag else [argument]
    return given


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameters that are dataclasses, in their place."""
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)
    }
    if not groups:
        return command

    @wraps(command)
    def grouped(**options: Any) -> None:
        made = {
            name: kind(**{field.name: options.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**options, **made)

    parameters = [
        option
        for name, parameter in signature.parameters.items()
        for option in (inspect.signature(groups[name]).parameters.values() if name in groups else [parameter])
    ]
    # typer reads both.
    grouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return grouped


def taking_key(command: Callable[..., None]) -> Callable[..., None]:
    """A command that asks a server, with `--api-key` as one more option: all of them get it here, alike."""
    signature = inspect.signature(command)
    if "server" not in signature.parameters:
        return command

    @wraps(command)
    def keyed(*args: Any, api_key: str | None = None, **options: Any) -> None:
        token = _given_key.set(api_key)
        try:
            command(*args, **options)
        finally:
            _given_key.reset(token)

    option = inspect.Parameter(
        "api_key", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=ApiKeyOption
    )
    parameters = list(signature.parameters.values())
    parameters.insert(list(signature.parameters).index("server") + 1, option)
    # typer reads both.
    keyed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    keyed.__annotations__ = {**command.__annotations__, "api_key": ApiKeyOption}
    return keyed


_given_key: ContextVar[str | None] = ContextVar("given_key", default=None)


def client_key(url: str) -> str | None:
    """What to show the server there: `--api-key`, else the environment's key, else that of [client]. A server of this
    machine is shown what the same file gives to serve: one line for both.
    """
    import os

    found = _given_key.get() or os.environ.get("LORASRV_API_KEY") or _client_option("api_key")
    return found or (_own_key() if is_loopback(urlsplit(url).hostname or "") else None)


def _own_key() -> str | None:
    from api.config.file import find, read

    path = find()
    said = None if path is None else read(path).serve.get("api_key")
    return said if isinstance(said, str) else None


@contextmanager
def connected(url: str, key: str | None = None, *, wait_s: float | None = None) -> Iterator["Client"]:
    """A client of the server; its errors become the command's."""
    from api.client import Client, Refused, ServerUnreachable

    try:
        with Client(url, key or client_key(url), wait_s=wait_s) as client:
            yield client
    except ServerUnreachable as error:
        raise CliError(str(error), code=ExitCode.UNREACHABLE) from None
    except Refused as error:
        if error.status == UNAUTHORIZED:
            raise CliError(_wants_key(error)) from None
        if error.problems:
            raise CliError("the adapter is refused", details=error.problems) from None
        raise CliError(str(error)) from None


def _wants_key(error: "Refused") -> str:
    if error.error.get("code") == "missing_api_key":
        return "the server asks for a key: give one with --api-key or LORASRV_API_KEY"
    return f"the server refuses the key: {error}; give another with --api-key or LORASRV_API_KEY"


def duration(option: str, text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d`. Raises: CliError."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise CliError(f"{option} {text!r} is no age; expected 90s, 30m, 12h or 7d", code=ExitCode.USAGE)
    return float(found[1]) * _SECONDS[found[2] or "s"]


def check_png(option: str, png: Path) -> None:
    """Whether a picture can be written, before seconds go into what it is to show. Raises: CliError."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise CliError(f"{option} needs matplotlib: pip install 'lorasrv[plot]'", code=ExitCode.USAGE)
    if not png.absolute().parent.is_dir():
        raise CliError(f"{option}: there is no folder {png.absolute().parent}", code=ExitCode.USAGE)


WAIT_S = 1.0
"""A shell waits for this; nobody presses Tab to read an error."""
MOST = 200


def complete_adapter_ids(ctx: Any, incomplete: str) -> list[str]:
    """Ids that begin so; none if the server is not there, is slow, or refuses."""
    try:
        found = _ids(ctx.params.get("server"), ctx.params.get("api_key"), incomplete)
    except Exception:
        return []
    return [adapter_id for adapter_id in found if adapter_id.startswith(incomplete)]


def _ids(server: str | None, key: str | None, incomplete: str) -> list[str]:
    import os

    from api.client import Client
    from api.config.file import client_options

    configured = client_options()
    url = server or os.environ.get("LORASRV_SERVER") or configured.get("server") or DEFAULT_SERVER
    key = key or os.environ.get("LORASRV_API_KEY") or configured.get("api_key")
    with Client(url, key, wait_s=WAIT_S) as client:
        found = client.get("/v1/adapters", search=incomplete, limit=MOST)["data"]
    return [str(adapter["id"]) for adapter in found]
