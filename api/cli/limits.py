"""limit: how much of a running server one adapter may have at a time."""

from typing import Annotated, Any

import typer

from api.address import DEFAULT_SERVER
from api.cli.adapters import IdArgument, limits_line
from api.cli.console import CliError, ExitCode, print_json, say
from api.cli.options import JsonOption, ServerOption, connected
from lorasrv.errors import InvalidLimits
from lorasrv.limits import Limits


def limit(
    adapter_id: IdArgument,
    max_running: Annotated[int | None, typer.Option(help="Most of its requests in a step.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Most of its requests that wait.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Most tokens in a second, on average.")] = None,
    resident_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most of the pool for it and its requests, e.g. 64MiB.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of the service among those that wait; 1 is usual.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Take away all limits that are not named beside it.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Limit an adapter, all its versions together; what is not named stays. Without options: show its limits.

    Where an adapter has no limit of its own, that of every adapter holds, which the server was started with.
    """
    options = {
        "max_running": max_running,
        "max_queued": max_queued,
        "tokens_per_s": tokens_per_s,
        "resident_bytes": None if resident_bytes is None else _bytes(resident_bytes),
        "weight": weight,
    }
    given = _checked({name: value for name, value in options.items() if value is not None})
    with connected(server) as client:
        limits: dict[str, Any] = {} if none else client.adapter(adapter_id)["limits"]
        if given or none:
            limits = client.limit(adapter_id, {**limits, **given})
    if as_json:
        print_json({"id": adapter_id, "limits": limits})
    else:
        say(f"{adapter_id}: {limits_line(limits)}")


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Here and not only by the server: JSON has no word for some numbers that a flag may be given."""
    try:
        Limits(**given)
    except InvalidLimits as error:
        raise CliError(
            f"--{error.param.replace('_', '-')}{str(error).removeprefix(error.param)}", code=ExitCode.USAGE
        ) from None
    return given


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise CliError(
            f"--resident-bytes {text!r} is no size; expected 64MiB, 2GB or bytes", code=ExitCode.USAGE
        ) from None
