"""List the adapters of a running server, or of a store that no server uses (list)."""

from typing import TYPE_CHECKING

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.commands import adapters
from api.cli.common.formatting import ClosedStoreOption
from api.cli.common.options import JsonOption, ServerOption
from api.cli.common.terminal import CliError, ExitCode, out, print_json, print_table, say, short_digest
from lorasrv.config import size

if TYPE_CHECKING:
    from adapter_store.registry.records import AdapterRecord


def list_adapters(
    ctx: typer.Context,
    store: ClosedStoreOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List the server's adapters, or with --store those of a folder, without a server."""
    if store is None:
        adapters.list_adapters(server, as_json)
        return
    given = ctx.get_parameter_source("server")
    if given is not None and given.name == "COMMANDLINE":
        raise CliError("--server and --store exclude each other: give one of them", code=ExitCode.USAGE)
    from adapter_store.maintenance.offline_store import OfflineStore
    from api.serving.model_list import adapter_json

    with OfflineStore(store.expanduser()) as closed:
        records = [record for _, record in sorted(closed.index.records().items())]
    if as_json:
        # Only a server that found damage, and store fsck, know what is damaged.
        print_json([adapter_json(record, frozenset()) for record in records])
    elif not out().is_terminal:
        for record in records:
            say("\t".join(_cells(record)))
    elif records:
        print_table(("id", "version", "digest", "rank", "size"), [_cells(record) for record in records], numbers=False)
    else:
        say("no adapters")


def _cells(record: "AdapterRecord") -> tuple[str, ...]:
    current = record.version(record.current_version)
    assert current is not None
    return (
        *(record.adapter_id, str(record.current_version), short_digest(record.key or "")),
        *(str(current.rank_max), size(current.bytes)),
    )
