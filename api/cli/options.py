"""Options that several subcommands share, and the client that they give."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.console import CliError, ExitCode

if TYPE_CHECKING:
    from api.client import Client

ServerOption = Annotated[
    str, typer.Option("--server", envvar="LORASRV_SERVER", metavar="URL", help="Where the server is.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output, one JSON value a line.")]


_LISTS = frozenset({"--lora-modules"})


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


@contextmanager
def connected(url: str, key: str | None = None) -> Iterator["Client"]:
    """A client of the server; its errors become the command's."""
    from api.client import Client, Refused, ServerUnreachable

    try:
        with Client(url, key) as client:
            yield client
    except ServerUnreachable as error:
        raise CliError(str(error), code=ExitCode.UNREACHABLE) from None
    except Refused as error:
        if error.problems:
            raise CliError("the adapter is refused", details=error.problems) from None
        raise CliError(str(error)) from None


def check_png(option: str, png: Path) -> None:
    """Whether a picture can be written, before seconds go into what it is to show. Raises: CliError."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise CliError(f"{option} needs matplotlib: pip install 'lorasrv[plot]'", code=ExitCode.USAGE)
    if not png.absolute().parent.is_dir():
        raise CliError(f"{option}: there is no folder {png.absolute().parent}", code=ExitCode.USAGE)
