"""Options that several subcommands share, and the client that they give."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.console import CliError, ExitCode

if TYPE_CHECKING:
    from api.client import Client

ServerOption = Annotated[
    str, typer.Option("--server", envvar="LORASRV_SERVER", metavar="URL", help="Where the server is.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output, one JSON value a line.")]


@contextmanager
def connected(url: str) -> Iterator["Client"]:
    """A client of the server; its errors become the command's."""
    from api.client import Client, Refused, ServerUnreachable

    try:
        with Client(url) as client:
            yield client
    except ServerUnreachable as error:
        raise CliError(str(error), code=ExitCode.UNREACHABLE) from None
    except Refused as error:
        if error.problems:
            raise CliError("the adapter is refused", details=error.problems) from None
        raise CliError(str(error)) from None
