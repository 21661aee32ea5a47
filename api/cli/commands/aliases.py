"""Move names to versions (alias, rollback) and limit adapters (limit) on a running server."""

from typing import Annotated, Any

import typer

from adapter_store.errors import InvalidAlias
from adapter_store.registry.references import AliasTarget, check_shares, target_to_json
from api.asgi.address import DEFAULT_SERVER
from api.cli.commands.adapters import IdArgument
from api.cli.common.formatting import limits_line, target_text
from api.cli.common.options import JsonOption, ServerOption, adapter_name, complete_adapter_ids, connected
from api.cli.common.terminal import CliError, ExitCode, print_json, print_table, say
from lorasrv.config import Limits
from lorasrv.errors import InvalidLimits

MAX_VERSION = 2**63 - 1


def alias(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID[:NAME]",
            help="An alias, or an id for all its aliases.",
            autocompletion=complete_adapter_ids,
            callback=adapter_name,
        ),
    ],
    versions: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERSION", help="Point it to a version (3), or split it between two (3=0.9 4=0.1)."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias; its version stays.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Point an alias to a version, which then answers requests for ID:NAME. Without a version, show the alias."""
    adapter_id, colon, label = name.partition(":")
    if remove and versions:
        raise CliError("give a version or --remove, not both", code=ExitCode.USAGE)
    if not colon and (versions or remove):
        raise CliError(f"name the alias: {adapter_id}:NAME", code=ExitCode.USAGE)
    target = _target(label, versions) if versions else None
    with connected(server) as client:
        if not versions and not remove:
            aliases = client.adapter(adapter_id)["aliases"]
            _show(adapter_id, label if colon else None, aliases, as_json)
            return
        if remove and label not in client.adapter(adapter_id)["aliases"]:
            raise CliError(f"there is no alias {name}")
        wanted = None if target is None else target_to_json(check_shares(label, target))
        client.change(adapter_id, {"aliases": {label: wanted}})
    if as_json:
        print_json({"id": adapter_id, "alias": label, "target": wanted})
    else:
        say(f"{name} -> {target_text(adapter_id, wanted)}" if wanted is not None else f"removed {name}")


def rollback(
    adapter_id: IdArgument,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, help=r"Version to go to. \[default: the one before]", show_default=False),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Make an older version the current one, which then answers requests for ID. Aliases are not changed."""
    with connected(server) as client:
        shown = client.adapter(adapter_id)
        current: int = shown["version"]
        version = to if to is not None else _version_before(adapter_id, current, shown["versions"])
        # Pass the ETag: if the id was moved meanwhile, the version to roll back to may be another one.
        client.change(adapter_id, {"version": version}, etag=shown["etag"])
    if as_json:
        print_json({"id": adapter_id, "version": version, "version_before": current})
    else:
        say(f"{adapter_id} is {adapter_id}@{version} now (was {adapter_id}@{current})")


def _version_before(adapter_id: str, current: int, versions: list[dict[str, Any]]) -> int:
    older = [int(v["version"]) for v in versions if v["version"] < current]
    if not older:
        raise CliError(f"{adapter_id}@{current} is the oldest version there is; name another with --to")
    return max(older)


def _target(label: str, texts: list[str]) -> AliasTarget:
    try:
        if len(texts) == 1 and "=" not in texts[0]:
            return _version(texts[0])
        pairs = [text.partition("=") for text in texts]
        target = {_version(version): float(share) for version, _, share in pairs}
        if len(target) < len(texts):
            raise CliError("a version is named twice", code=ExitCode.USAGE)
        check_shares(label, target)
    except InvalidAlias as error:
        raise CliError(str(error), code=ExitCode.USAGE) from None
    except ValueError:
        raise CliError(
            f"{' '.join(texts)!r} is not a version; expected 3, or two with shares: 3=0.9 4=0.1", code=ExitCode.USAGE
        ) from None
    return target


def _version(text: str) -> int:
    number = int(text.removeprefix("@"))
    if not 1 <= number <= MAX_VERSION:
        raise ValueError(text)
    return number


def _show(adapter_id: str, label: str | None, aliases: dict[str, Any], as_json: bool) -> None:
    if label is not None and label not in aliases:
        raise CliError(f"there is no alias {adapter_id}:{label}")
    shown = aliases if label is None else {label: aliases[label]}
    if as_json:
        print_json({"id": adapter_id, "aliases": shown})
    elif shown:
        rows = [(f"{adapter_id}:{name}", target_text(adapter_id, target)) for name, target in shown.items()]
        print_table(("alias", "version"), rows)
    else:
        say(f"{adapter_id}: no aliases; add one with: lorasrv alias {adapter_id}:NAME VERSION")


def limit(
    adapter_id: IdArgument,
    max_running: Annotated[int | None, typer.Option(help="Maximum number of its requests in a step.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Maximum number of its waiting requests.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Maximum average of tokens per second.")] = None,
    resident_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum part of the pool for it and its requests, e.g. 64MiB.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Its share relative to other waiting adapters; the default is 1.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove all limits except the given ones.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Limit an adapter with all its versions. Limits that are not given stay. Without options, show its limits.

    For limits that an adapter does not have, the server's defaults for all adapters apply.
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
    """Check the limits before sending them, because options accept numbers that JSON cannot represent."""
    try:
        Limits(**given)
    except InvalidLimits as error:
        flag, why = error.param.replace("_", "-"), str(error).removeprefix(error.param)
        raise CliError(f"--{flag}{why}; --none removes limits", code=ExitCode.USAGE) from None
    return given


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise CliError(
            f"--resident-bytes {text!r} is not a size; expected 64MiB, 2GB or bytes", code=ExitCode.USAGE
        ) from None
