"""Define options that several commands share, the client that they configure, and the completion of adapter ids."""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from adapter_store.registry.references import ID_RULE
from api.asgi.address import DEFAULT_SERVER, is_loopback
from api.cli.common.terminal import CliError, ExitCode
from lorasrv.config import default_store_dir
from lorasrv.errors import to_install

if TYPE_CHECKING:
    from api.client import Client, Refused

ServerOption = Annotated[
    str,
    # A function reads the default from the configuration file; without `show_default`, help would show its name.
    typer.Option(
        "--server",
        envvar="LORASRV_SERVER",
        metavar="URL",
        help="URL of the server, with its host and port.",
        show_default=DEFAULT_SERVER,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="LORASRV_API_KEY",
        metavar="KEY",
        help="API key, if the server requires one.",
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
ReplicaOption = Annotated[
    str | None, typer.Option("--replica", metavar="ID", help="Replica to ask, behind an address of several.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON value per line.")]
BAD_REQUEST, UNAUTHORIZED = 400, 401
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
# Commands whose --server has no default: in `plan`, it is a source of costs.
_NO_SERVER = frozenset({"plan"})


class ServerDefaults(dict[str, Any]):
    """Give typer the default of --server for every command.

    The configuration file is read only if neither the flag nor the environment sets the server.
    """

    def get(self, command: str, default: Any = None) -> Any:
        return {} if command in _NO_SERVER else {"server": partial(_client_option, "server", DEFAULT_SERVER)}


def _client_option(name: str, default: str | None = None) -> Any:
    from api.config.file import client_options

    return client_options().get(name, default)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameters that are dataclasses by one option per field."""
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


def with_finite_numbers(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse options that are NaN or infinite: range checks can miss them, and JSON cannot represent them."""

    @wraps(command)
    def finite(*args: Any, **options: Any) -> None:
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                hint = f"'--{name.replace('_', '-')}'"
                raise typer.BadParameter(f"{value} is not a finite number.", param_hint=hint)
        command(*args, **options)

    return finite


def with_api_key(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--api-key` to a command that connects to a server."""
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


_IN_HEADER = re.compile(r"[!-~]+")
_given_key: ContextVar[str | None] = ContextVar("given_key", default=None)


def client_key(url: str) -> str | None:
    """Return the API key for a server: `--api-key`, else LORASRV_API_KEY, else the key in [client].

    For a server on this machine, the last choice is `api_key` of serve in the same file, so that one line configures
    both.

    Raises:
        CliError: a header cannot hold the key.
    """
    found = _given_key.get() or os.environ.get("LORASRV_API_KEY") or _client_option("api_key")
    return _sendable(found or (_own_key() if is_loopback(urlsplit(url).hostname or "") else None))


def _sendable(key: str | None) -> str | None:
    """Return the key if a header can hold it.

    Raises: CliError.
    """
    if key is not None and not _IN_HEADER.fullmatch(key):
        why = "has characters that no key has: give printable ASCII without spaces"
        raise CliError(f"the API key of --api-key, LORASRV_API_KEY or [client] {why}", code=ExitCode.USAGE)
    return key


def _own_key() -> str | None:
    from api.config.file import find, read

    path = find()
    key = None if path is None else read(path).serve.get("api_key")
    return key if isinstance(key, str) else None


@contextmanager
def connected(
    url: str, key: str | None = None, *, wait_s: float | None = None, flags: Mapping[str, str] = MappingProxyType({})
) -> Iterator["Client"]:
    """Connect a client, and convert its errors to the command's.

    Args:
        flags: request field -> option that sets it. If the server refuses a field's value, the error names the option.
    """
    from api.client import Client, InvalidAddress, Refused, ServerUnreachable

    try:
        with Client(url, _sendable(key) or client_key(url), wait_s=wait_s) as client:
            yield client
    except InvalidAddress as error:
        raise CliError(str(error), code=ExitCode.USAGE) from None
    except ServerUnreachable as error:
        raise CliError(str(error), code=ExitCode.UNREACHABLE) from None
    except Refused as error:
        if error.status == UNAUTHORIZED:
            raise CliError(_key_message(error)) from None
        if error.problems:
            raise CliError("the adapter is refused", details=error.problems) from None
        field = re.split(r"[.\[]", error.error.get("param") or "")[0]
        why = _of_flag(flags[field], field, str(error)) if field in flags else str(error)
        is_usage = error.status == BAD_REQUEST and field in flags
        raise CliError(why, code=ExitCode.USAGE if is_usage else ExitCode.REFUSED) from None


def _of_flag(flag: str, field: str, message: str) -> str:
    """Return an error message about a field as one about its option."""
    return flag + message.removeprefix(field) if message.startswith(field) else f"{flag}: {message}"


def _key_message(error: "Refused") -> str:
    if error.error.get("code") == "missing_api_key":
        return "the server requires an API key: give one with --api-key or LORASRV_API_KEY"
    return f"the server refuses the API key: {error}; give another with --api-key or LORASRV_API_KEY"


def check_one_server(url: str, metrics: Mapping[str, float]) -> None:
    """Check by its metrics that an address is that of a single server.

    Raises: CliError: it is the address of several replicas.
    """
    if ids := [_REPLICA.findall(name)[0] for name in metrics if name.startswith(_OF_EDGE)]:
        raise CliError(
            f"{url} is the address of several replicas; choose one with --replica {' or '.join(sorted(ids))}"
        )


_OF_EDGE = "lorasrv_edge_replica_ready{"
_REPLICA = re.compile(r'replica="([^"]*)"')


def adapter_name(given: str | list[str]) -> str | list[str]:
    """Check arguments that name adapters as far as possible without the server.

    Raises: typer.BadParameter: a name has no id or has a slash, so that the path of a request cannot hold it.
    """
    for name in [given] if isinstance(given, str) else given:
        if not name or name[0] in ":@" or "/" in name:
            raise typer.BadParameter(f"adapter id {name!r} is not allowed: use {ID_RULE}")
    return given


def expanded(given: Path | None) -> Path | None:
    """Expand ~ in a path, which a shell does not expand in a variable or inside quotes."""
    return None if given is None else Path(os.path.expanduser(given))


def existing(given: Path | None) -> Path | None:
    """Expand ~ in a path, and check that it exists.

    Raises: typer.BadParameter.
    """
    path = expanded(given)
    if path is not None and not path.exists():
        raise typer.BadParameter(f"{str(path)!r} does not exist.")
    return path


def existing_folder(given: Path | None) -> Path | None:
    """Expand ~ in a path, and check that it is a folder.

    Raises: typer.BadParameter.
    """
    path = existing(given)
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is no folder.")
    return path


def configured_store() -> Path:
    """Return the store that `serve` would use, so that a command does not change another one by mistake."""
    from api.config.file import find, read

    path = find()
    said = None if path is None else read(path).serve.get("store")
    return Path(said) if isinstance(said, str) and said else default_store_dir()


def duration(option: str, text: str) -> float:
    """Parse `90s`, `30m`, `12h` or `7d` to seconds.

    Raises: CliError.
    """
    found = _AGE.fullmatch(text)
    if found is None:
        raise CliError(f"{option} {text!r} is not a duration; expected 90s, 30m, 12h or 7d", code=ExitCode.USAGE)
    return float(found[1]) * _SECONDS[found[2]]


def check_png(option: str, png: Path) -> None:
    """Check that a plot can be written, before spending time on its data.

    Raises: CliError.
    """
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise CliError(f"{option} needs matplotlib: {to_install('plot')}", code=ExitCode.USAGE)
    if not png.absolute().parent.is_dir():
        raise CliError(f"{option}: the folder {png.absolute().parent} does not exist", code=ExitCode.USAGE)


WAIT_S = 1.0
"""Time limit of shell completion, which shows no errors."""
MAX_COMPLETIONS = 200


def complete_adapter_ids(ctx: Any, incomplete: str) -> list[str]:
    """Return ids with this prefix; none if the server is unreachable, slow, or refuses."""
    try:
        found = _ids(ctx.params.get("server"), ctx.params.get("api_key"), incomplete)
    except Exception:
        return []
    return [adapter_id for adapter_id in found if adapter_id.startswith(incomplete)]


def _ids(server: str | None, key: str | None, incomplete: str) -> list[str]:
    from api.client import Client
    from api.config.file import client_options

    configured = client_options()
    url = server or os.environ.get("LORASRV_SERVER") or configured.get("server") or DEFAULT_SERVER
    key = key or os.environ.get("LORASRV_API_KEY") or configured.get("api_key")
    with Client(url, key, wait_s=WAIT_S) as client:
        found = client.get("/v1/adapters", search=incomplete, limit=MAX_COMPLETIONS)["data"]
    return [str(adapter["id"]) for adapter in found]
