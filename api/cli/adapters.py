"""upload, list, show, rm: adapters of a running server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adapter_store.peft_dir import PeftDir, read_peft_dir
from api.address import DEFAULT_SERVER
from api.cli.console import note, out, print_json, progress, say, short_digest
from api.cli.options import JsonOption, ServerOption, connected

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Adapter id.")]


def upload(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that PEFT's save_pretrained() wrote.")],
    adapter_id: Annotated[str, typer.Option("--id", help="Name to serve it under.")],
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Fail if the id is taken.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Send an adapter to the server, which checks it against its base and reports what matched."""
    peft = read_peft_dir(directory)
    for line in found_lines(peft):
        note(line)
    with connected(server) as client, progress(in_bytes=True) as step:
        done = client.upload(peft, adapter_id, if_not_exists=if_not_exists, progress=step)
    if as_json:
        print_json(done)
        return
    state = "registered" if done["created"] else "unchanged:"
    say(f"{state} {done['id']}@{done['version']}  {short_digest(done['digest'])}")
    for line in report_lines(done["report"]):
        say(f"  {line}")


def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Adapters of the server."""
    with connected(server) as client:
        adapters = client.adapters()
    if as_json:
        print_json(adapters)
        return
    if not out().is_terminal:
        for adapter in adapters:
            say("\t".join(_cells(adapter)))
        return
    from rich.table import Table

    table = Table("id", "version", "digest", "rank", "size", box=None)
    for adapter in adapters:
        table.add_row(*_cells(adapter))
    out().print(table if adapters else "no adapters; add one with: lorasrv upload DIR --id ID")


def show(adapter_id: IdArgument, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """One adapter: its versions and the report of the current one."""
    with connected(server) as client:
        adapter = client.adapter(adapter_id)
    if as_json:
        print_json(adapter)
        return
    say(f"{adapter['id']}@{adapter['version']}  {adapter['digest']}")
    for line in report_lines(adapter["report"]):
        say(f"  {line}")
    say(f"  {limits_line(adapter['limits'])}")
    for version in adapter["versions"]:
        say(f"  version {version['version']}: {short_digest(version['digest'])}, {size(version['bytes'])}")


def rm(
    reference: Annotated[str, typer.Argument(metavar="ID[@VERSION]", help="An id, or one version of it.")],
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Remove an adapter, or one version; running requests finish on what they started with."""
    with connected(server) as client:
        done = client.delete(reference)
    if as_json:
        print_json(done)
        return
    say(f"removed {reference} ({done['versions_removed']} version{'s' if done['versions_removed'] != 1 else ''})")


def found_lines(peft: PeftDir) -> list[str]:
    """Where the adapter was found, and what beside it is not used."""
    lines = [f"found in sub-folder {peft.subdirectory}"] if peft.subdirectory else []
    return [*lines, f"not used: {', '.join(peft.ignored_files)}"] if peft.ignored_files else lines


def report_lines(report: dict[str, Any]) -> list[str]:
    """An upload report for people."""
    ranks = _range(report["rank_min"], report["rank_max"])
    scaling = _range(f"{report['scaling_min']:g}", f"{report['scaling_max']:g}")
    return [
        f"{report['modules_matched']} of {report['modules_expected']} modules matched in {report['layers']} layers, "
        f"rank {ranks}, scaling {scaling}, {report['dtype']}, {size(report['weights_bytes'])}",
        *(f"warning: {warning}" for warning in report["warnings"]),
    ]


def limits_line(limits: dict[str, Any]) -> str:
    """Limits for people."""
    shown = (f"{name} {size(value) if name == 'resident_bytes' else f'{value:.10g}'}" for name, value in limits.items())
    return ", ".join(shown) or "no limits of its own"


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _range(low: object, high: object) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _cells(adapter: dict[str, Any]) -> tuple[str, ...]:
    current = next(v for v in adapter["versions"] if v["version"] == adapter["version"])
    return (
        adapter["id"],
        str(adapter["version"]),
        short_digest(adapter["digest"]),
        str(current["rank"]),
        size(current["bytes"]),
    )
