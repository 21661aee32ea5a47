"""upload, list, show, rm: adapters of a running server."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from adapter_store.adapter_dir import open_adapter_dir
from adapter_store.peft_dir import PeftDir
from api.address import DEFAULT_SERVER
from api.cli.completion import complete_adapter_ids
from api.cli.console import CliError, ExitCode, note, out, print_json, progress, say, short_digest
from api.cli.options import JsonOption, ServerOption, connected
from api.cli.stats import stats_lines
from lorasrv.config import BUILTIN_MODEL

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder that PEFT's save_pretrained(), or MLX, wrote.")
]
PartialOption = Annotated[
    bool, typer.Option("--allow-partial", help="Take it though modules that its config names have no tensors.")
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Adapter id.", autocompletion=complete_adapter_ids)]


def upload(
    directory: DirectoryArgument,
    adapter_id: Annotated[str | None, typer.Option("--id", help="Name to serve it under.")] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Fail if the id is taken.")] = False,
    alias: Annotated[str | None, typer.Option(help="Move this alias of the id, or of each id, to it, too.")] = None,
    allow_partial: PartialOption = False,
    every: Annotated[bool, typer.Option("--all", help="DIR is a tree of such folders: send all.")] = False,
    prefix: Annotated[str, typer.Option(help="Put before each id of --all.")] = "",
    slugify: Annotated[bool, typer.Option("--slugify", help="Make allowed ids of others: Org/Mia is org-mia.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: check here, send nothing.")] = False,
    model: Annotated[str, typer.Option(help="Base that --dry-run checks against.")] = BUILTIN_MODEL,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Send an adapter to the server, which checks it against its base and reports what matched."""
    from api.cli import bulk

    if every == (adapter_id is not None) or ((prefix or dry_run) and not every):
        message = "give either --id ID for one adapter, or --all, to which alone belong --prefix and --dry-run"
        raise CliError(message, code=ExitCode.USAGE)
    if adapter_id is None:
        tree = bulk.Tree(directory, prefix, slugify)
        if dry_run:
            bulk.check_all(tree, model, allow_partial, as_json)
        else:
            how = bulk.How(if_not_exists, alias, allow_partial)
            bulk.upload_all(tree, server, how, as_json)
        return
    adapter_id = bulk.adapter_id_of(adapter_id, slugify)
    with open_adapter_dir(directory) as peft:
        for line in found_lines(peft):
            note(line)
        with connected(server) as client, progress(in_bytes=True) as step:
            done = client.upload(
                peft,
                adapter_id,
                if_not_exists=if_not_exists,
                alias=alias,
                allow_partial=allow_partial,
                progress=step,
            )
    if as_json:
        print_json({**done, **found_facts(peft)})
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
    """One adapter: its versions, its aliases, the report of the current version, what it was asked and what it cost."""
    with connected(server) as client:
        stats = client.stats(adapter_id)
        adapter = client.adapter(adapter_id) if stats["versions"] else None
    if as_json:
        print_json({**(adapter or {}), "stats": stats})
        return
    if adapter is None:
        for line in (f"{stats['id']}, the base", *stats_lines(stats)):
            say(line)
        return
    say(f"{adapter['id']}@{adapter['version']}  {adapter['digest']}")
    for line in report_lines(adapter["report"]):
        say(f"  {line}")
    say(f"  tier {adapter['tier'] or 'unknown'}, asked {adapter['traffic']['requests']} times since the start")
    for line in stats_lines(stats):
        say(f"  {line}")
    say(f"  {limits_line(adapter['limits'])}")
    for version in adapter["versions"]:
        corrupt = ", damaged on the disk: upload it again" if version["corrupt"] else ""
        say(f"  version {version['version']}: {short_digest(version['digest'])}, {size(version['bytes'])}{corrupt}")
    for alias, target in adapter["aliases"].items():
        say(f"  {adapter['id']}:{alias} -> {target_text(adapter['id'], target)}")
    say(f"  {verdict_line(adapter['verified'])}")


def rm(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="ID[@VERSION]", help="An id, or one version of it.", autocompletion=complete_adapter_ids
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Whatever is in the way: aliases of it go, its requests end with an error.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=60, metavar="SECONDS", help="Wait so long for its requests to end.")
    ] = 0.0,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Remove an adapter, or one version; running requests finish on what they started with."""
    with connected(server) as client:
        done = client.delete(reference, force=force, wait_s=wait)
    if as_json:
        print_json(done)
        return
    say(f"removed {reference} ({_count(done['versions_removed'], 'version')})")
    for alias in done["aliases_removed"]:
        say(f"removed {reference.partition('@')[0]}:{alias}")
    if done["requests_ended"]:
        say(f"ended {_count(done['requests_ended'], 'request')}")
    if done["requests_running"]:
        note(f"{_count(done['requests_running'], 'request')} still on it")


def found_lines(peft: PeftDir) -> list[str]:
    """Where the adapter was found, what was converted, and what beside it is not used."""
    lines = [f"found in sub-folder {peft.subdirectory}"] if peft.subdirectory else []
    ignored = [f"not used: {', '.join(peft.ignored_files)}"] if peft.ignored_files else []
    return [*lines, *peft.notices, *ignored]


def found_facts(peft: PeftDir) -> dict[str, Any]:
    """The same for programs."""
    return {
        "subdirectory": peft.subdirectory,
        "converted": list(peft.notices),
        "ignored_files": list(peft.ignored_files),
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """An upload report for people."""
    ranks = _range(report["rank_min"], report["rank_max"])
    norm = f", norm of B {report['norm_b']:.4g}" if report.get("norm_b") is not None else ""
    scaling = _range(f"{report['scaling_min']:g}", f"{report['scaling_max']:g}")
    return [
        f"{report['modules_matched']} of {report['modules_expected']} modules matched in {report['layers']} layers, "
        f"rank {ranks}, scaling {scaling}, {report['dtype']}, {size(report['weights_bytes'])}{norm}",
        *(f"notice: {notice}" for notice in report.get("notices") or ()),
        *(f"warning: {warning}" for warning in report["warnings"]),
    ]


def limits_line(limits: dict[str, Any]) -> str:
    """Limits for people."""
    shown = (f"{name} {size(value) if name == 'resident_bytes' else f'{value:.10g}'}" for name, value in limits.items())
    return ", ".join(shown) or "no limits of its own"


def verdict_line(verdict: dict[str, Any] | None) -> str:
    """What the last verification of the current version came to, for people."""
    if verdict is None:
        return "never verified (lorasrv verify)"
    when = datetime.fromtimestamp(verdict["created"], UTC)
    error = verdict["adapter_error"]
    return (
        f"verified {when:%Y-%m-%d %H:%M} UTC: {verdict['verdict']}, logits off by at most {error['max_abs']:.3g}, "
        f"{error['mean_abs']:.3g} on average"
    )


def target_text(adapter_id: str, target: int | dict[str, float]) -> str:
    """What an alias points to, for people: `mia@3`, or `mia@3 90 %, mia@4 10 %`."""
    if isinstance(target, int):
        return f"{adapter_id}@{target}"
    return ", ".join(f"{adapter_id}@{version} {100 * share:g} %" for version, share in target.items())


def size(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


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
