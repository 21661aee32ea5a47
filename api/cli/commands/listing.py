"""List the adapters of a running server, or of a store that no server uses (list)."""

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.commands import adapters
from api.cli.common.formatting import ClosedStoreOption
from api.cli.common.options import JsonOption, ServerOption
from api.cli.common.terminal import CliError, ExitCode


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
    from adapter_store.errors import StoreLocked
    from adapter_store.maintenance.offline_store import OfflineStore
    from api.serving.model_list import adapter_json

    try:
        with OfflineStore(store) as closed:
            records = [record for _, record in sorted(closed.index.records().items())]
    except StoreLocked as error:
        raise CliError(f"{error}, or ask it: lorasrv list") from None
    # Only a server that found damage, and store fsck, know what is damaged.
    adapters.print_list([adapter_json(record, frozenset()) for record in records], as_json)
