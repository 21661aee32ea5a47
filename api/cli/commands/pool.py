"""Show and control the pool of a running server (warm, pin, unpin, pool)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import (
    JsonOption,
    ReplicaOption,
    ServerOption,
    adapter_name,
    check_one_server,
    complete_adapter_ids,
    connected,
)
from api.cli.common.terminal import CliError, out, print_json, say, short_digest
from lorasrv.config import size

if TYPE_CHECKING:
    from rich.text import Text


# What pages are used for, with the colour of each use.
PARTS = {"kv": "cyan", "prefix": "blue", "adapters": "magenta", "free": "bright_black"}
BAR_CHARS = 60
ADAPTER_TITLES = ("adapter", "pages", "used", "requests", "state", "pinned")
REQUEST_TITLES = ("request", "adapter", "pages", "shared")
MAX_DEADLINE_MS = 600_000
"""The server's value, repeated here because importing its schemas takes half a second."""
Reference = Annotated[
    str,
    typer.Argument(
        metavar="ID[@VERSION]",
        help="An adapter, or one version of it.",
        autocompletion=complete_adapter_ids,
        callback=adapter_name,
    ),
]


def warm(
    reference: Reference,
    deadline_ms: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_DEADLINE_MS, help=r"How long to wait; 0 only starts loading. \[default: 10000]"),
    ] = None,
    replica: ReplicaOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Load an adapter into the pool before its first request. Fails if it is not resident in time."""
    with connected(server) as client:
        done = client.warm(reference, deadline_ms, replica)
    if as_json:
        print_json(done)
    elif done["reached"]:
        say(f"{done['id']} is in the pool  {short_digest(done['digest'])}  loaded in {done['load_ms']:.1f} ms")
    elif deadline_ms == 0:
        say(f"{done['id']} is loading from {done['tier']}  {short_digest(done['digest'])}")
    if not done["reached"] and deadline_ms != 0:
        raise CliError(f"{done['id']} was not loaded in time ({done['tier']}); allow more with --deadline-ms")


def pin(
    reference: Reference,
    replica: ReplicaOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Keep an adapter in the pool until it is unpinned or the server restarts; later versions are not pinned."""
    _set_pinned(reference, replica, server, as_json, pinned=True)


def unpin(
    reference: Reference,
    replica: ReplicaOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Allow an adapter to be evicted from the pool."""
    _set_pinned(reference, replica, server, as_json, pinned=False)


def _set_pinned(reference: str, replica: str | None, server: str, as_json: bool, *, pinned: bool) -> None:
    with connected(server) as client:
        done = client.pin(reference, pinned=pinned, replica=replica)
    if as_json:
        print_json(done)
        return
    state = "pinned" if done["pinned"] else "unpinned"
    say(f"{state} {done['id']}  {short_digest(done['digest'])}  {done['tier']}")


def pool(replica: ReplicaOption = None, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show the server's memory: free pages, and the adapters and requests that hold the others."""
    with connected(server) as client:
        if replica is None:
            check_one_server(client.url, client.metrics())
        shown = client.pool(replica)
    if as_json:
        print_json(shown)
    elif out().is_terminal:
        _print_tables(shown)
    else:
        for row in _rows(shown):
            say("\t".join(row))


def _rows(shown: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield rows for files and pipes. Each kind of row has a title row; the first cell of a row is its kind."""
    yield "kind", "part", "pages"
    for part in ("total", *PARTS):
        yield "pages", part, str(shown[f"pages_{part}"])
    if shown["adapters"]:
        yield "kind", *ADAPTER_TITLES
    for adapter in _by_pages(shown["adapters"]):
        yield "adapter", *_adapter_cells(adapter)
    if shown["requests"]:
        yield "kind", *REQUEST_TITLES
    for request in _by_pages(shown["requests"]):
        yield "request", *_request_cells(request)


def _print_tables(shown: dict[str, Any]) -> None:
    from rich.table import Table

    adapters = Table(*ADAPTER_TITLES, box=None)
    for adapter in _by_pages(shown["adapters"]):
        adapters.add_row(*_adapter_cells(adapter))
    requests = Table(*REQUEST_TITLES, box=None)
    for request in _by_pages(shown["requests"]):
        requests.add_row(*_request_cells(request))
    console = out()
    console.print(_bar(shown))
    console.print(_legend(shown))
    for table in (adapters, requests):
        if table.row_count:
            console.print()
            console.print(table)


def _bar(shown: dict[str, Any]) -> "Text":
    """Draw the pool as a bar. Each use with pages gets at least one character, and free pages get the rest."""
    from rich.text import Text

    total = max(1, shown["pages_total"])
    widths = {part: -(-BAR_CHARS * shown[f"pages_{part}"] // total) for part in PARTS if part != "free"}
    widths["free"] = max(0, BAR_CHARS - sum(widths.values()))
    return Text.assemble(*(("█" * widths[part], colour) for part, colour in PARTS.items()))


def _legend(shown: dict[str, Any]) -> "Text":
    from rich.text import Text

    parts = [(f"{part} {shown[f'pages_{part}']}  ", colour) for part, colour in PARTS.items()]
    page = f"of {shown['pages_total']} pages of {size(shown['block_bytes'])} ({shown['page_tokens']} tokens)"
    return Text.assemble(*parts, page)


def _by_pages(holders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(holders, key=lambda holder: -int(holder["pages"]))


def _adapter_cells(adapter: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(adapter) if adapter["versions"] else f"{_name(adapter)} (deleted)",
        str(adapter["pages"]),
        f"{100 * adapter['bytes_used'] / max(1, adapter['bytes_held']):.0f} %",
        str(adapter["requests"]),
        adapter["state"],
        "pinned" if adapter["pinned"] else "-",
    )


def _request_cells(request: dict[str, Any]) -> tuple[str, ...]:
    name = _name(request) if request["digest"] else "-"
    return request["request_id"], name, str(request["pages"]), str(request["shared"])


def _name(holder: dict[str, Any]) -> str:
    """Return the versions of a content, or its digest if it has none: it is a sum, or the versions were deleted."""
    return ", ".join(holder["versions"]) or short_digest(holder["digest"])
