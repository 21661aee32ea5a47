"""Upload, list, show and delete adapters of a running server (upload, list, show, rm)."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.spec import BF16
from api.asgi.address import DEFAULT_SERVER
from api.cli.common.formatting import (
    DefaultsOption,
    DirectoryArgument,
    DriftOption,
    NoTokenizerOption,
    PartialOption,
    StoredOption,
    counted,
    found_facts,
    found_lines,
    limits_line,
    report_lines,
    target_text,
    utc,
    verdict_line,
)
from api.cli.common.options import UNAUTHORIZED, JsonOption, ServerOption, adapter_name, complete_adapter_ids, connected
from api.cli.common.terminal import CliError, ExitCode, note, out, print_json, print_table, progress, say, short_digest
from api.cli.personas.files import persona_lines, registered_lines, valid_defaults
from lorasrv.config import BUILTIN_MODEL, size

MIB = 2**20


def stats_lines(stats: dict[str, Any]) -> Iterator[str]:
    """Format a response of `GET /v1/adapters/{id}/stats`; a single line if there were no requests."""
    if not stats["requests"] and not stats["prompt_tokens"]:
        yield "in all: no requests"
        return
    ends = {"failed": "errors", "refused": "refused", "aborted": "aborted", "fell back to the base": "fallbacks"}
    shown = "".join(f", {stats[name]} {word}" for word, name in ends.items() if stats[name])
    yield f"in all: {counted(stats['requests'], 'request')}{shown}, last {_when(stats['last_used'])}"
    yield (
        f"{stats['prompt_tokens']} prompt tokens ({stats['cached_tokens']} cached), "
        f"{stats['generated_tokens']} generated, in {stats['compute_seconds']:.1f} s of compute"
    )
    drafts = stats["speculation"]
    if drafts["drafted"]:
        right = 100 * drafts["accepted"] / drafts["drafted"]
        yield f"{drafts['tokens_per_step']:.2f} tokens a step; {right:.0f} % of {drafts['drafted']} draft tokens right"
    if any(stats["found"].values()):
        ratios = ", ".join(f"{tier} {100 * share:.0f} %" for tier, share in stats["hit_ratio"].items())
        moved = f"{stats['disk_bytes'] / MIB:.1f} MiB from disk, {stats['pool_bytes'] / MIB:.1f} MiB to the pool"
        yield f"found: {ratios}; moved {moved}; held {stats['resident_byte_hours'] / MIB:.1f} MiB hours of the pool"
    for kind, first in stats["ttft"].items():
        if first["count"]:
            yield (
                f"first token, {kind}: {first['mean_ms']:.0f} ms on average of {counted(first['count'], 'request')}, "
                f"half within {first['p50_ms']:.0f}, 95 % within {first['p95_ms']:.0f}"
            )


def _when(unix_s: int | None) -> str:
    return "never" if unix_s is None else utc(unix_s)


IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Adapter id.", autocompletion=complete_adapter_ids, callback=adapter_name)
]


def upload(
    directory: DirectoryArgument,
    adapter_id: Annotated[
        str | None, typer.Option("--id", help="Id to serve it under; by default the folder's name.")
    ] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Fail if the id is taken.")] = False,
    alias: Annotated[
        str | None, typer.Option(help="Also move this alias of each uploaded id to the new version.")
    ] = None,
    allow_partial: PartialOption = False,
    stored: StoredOption = None,
    allow_drift: DriftOption = False,
    defaults: DefaultsOption = None,
    no_tokenizer: NoTokenizerOption = False,
    every: Annotated[bool, typer.Option("--all", help="Upload all adapter folders below DIR.")] = False,
    prefix: Annotated[str, typer.Option(help="Prefix for each id of --all.")] = "",
    slugify: Annotated[
        bool, typer.Option("--slugify", help="Convert ids that are not allowed: Org/Mia becomes org-mia.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: check here, send nothing.")] = False,
    model: Annotated[str, typer.Option(help="Base that --dry-run checks against.")] = BUILTIN_MODEL,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Upload an adapter. The server validates it against its base, and reports what matched."""
    from api.cli.commands import bulk_upload

    if every and adapter_id is not None:
        raise CliError("--id and --all exclude each other: --all takes ids from the paths", code=ExitCode.USAGE)
    if every and defaults is not None:
        raise CliError("--defaults and --all exclude each other: a persona is one adapter's", code=ExitCode.USAGE)
    if (prefix or dry_run) and not every:
        raise CliError("--prefix and --dry-run need --all", code=ExitCode.USAGE)
    if every:
        tree = bulk_upload.Tree(directory, prefix, slugify)
        if dry_run:
            terms = {"allow_partial": allow_partial, "stored": stored or BF16, "allow_drift": allow_drift}
            bulk_upload.check_all(tree, model, terms, as_json, no_tokenizer)
        else:
            how = bulk_upload.How(if_not_exists, alias, allow_partial, stored, allow_drift, no_tokenizer)
            bulk_upload.upload_all(tree, server, how, as_json)
        return
    adapter_id = bulk_upload.adapter_id_of(adapter_id or directory, slugify)
    given = None if defaults is None else valid_defaults(defaults)
    with open_adapter_dir(directory) as found, connected(server) as client:
        peft = found if no_tokenizer else client.with_tokenizer(found)
        for line in found_lines(peft):
            note(line)
        with progress(in_bytes=True) as step:
            done = client.upload(
                peft,
                adapter_id,
                if_not_exists=if_not_exists,
                alias=alias,
                allow_partial=allow_partial,
                stored=stored,
                allow_drift=allow_drift,
                defaults=given,
                progress=step,
            )
    if as_json:
        print_json({**done, **found_facts(peft)})
        return
    for line in registered_lines(done):
        say(line)


def list_adapters(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """List the server's adapters."""
    with connected(server) as client:
        adapters = client.adapters()
    print_list(adapters, as_json)


def print_list(adapters: list[dict[str, Any]], as_json: bool) -> None:
    """Print adapters, given in the format of `GET /v1/adapters`."""
    if as_json:
        print_json(adapters)
        return
    if not out().is_terminal:
        for adapter in adapters:
            say("\t".join(_cells(adapter)))
    elif not adapters:
        say("no adapters; add one with: lorasrv upload DIR")
    else:
        titles = ("id", "version", "digest", "rank", "stored", "size")
        print_table(titles, [_cells(adapter) for adapter in adapters], numbers=False)
    for adapter in adapters:
        if adapter["corrupt"]:
            note(f"{adapter['id']}@{adapter['version']} is damaged on the disk: upload it again")


def show(adapter_id: IdArgument, server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Show an adapter: versions, aliases, the current version's report, usage and cost."""
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
    is_sum = "adapters" in (adapter["persona"] or {"fields": ()})["fields"]
    without = "a sum of adapters" if is_sum else "no weights: the base answers"
    say(f"{adapter['id']}@{adapter['version']}  {adapter['digest'] or without}")
    for line in (*report_lines(adapter["report"] or {}), *persona_lines(adapter["persona"])):
        say(f"  {line}")
    tier = f"tier {adapter['tier'] or 'unknown'}, " if adapter["digest"] else ""
    say(f"  {tier}{counted(adapter['traffic']['requests'], 'request')} since the start")
    for line in stats_lines(stats):
        say(f"  {line}")
    say(f"  {limits_line(adapter['limits'])}")
    for version in adapter["versions"]:
        corrupt = ", damaged on the disk: upload it again" if version["corrupt"] else ""
        facts = "no weights"
        if version["digest"]:
            facts = f"{short_digest(version['digest'])}, {size(version['bytes'])}, {version['stored']}"
        facts += f", defaults {short_digest(version['persona'])}" if version["persona"] else ""
        say(f"  version {version['version']}: {facts}{corrupt}")
    for alias, target in adapter["aliases"].items():
        say(f"  {adapter['id']}:{alias} -> {target_text(adapter['id'], target)}")
    if adapter["digest"]:
        say(f"  {verdict_line(adapter['verified'])}")


def rm(
    references: Annotated[
        list[str],
        typer.Argument(
            metavar="ID[@VERSION]",
            help="Ids, or single versions of them.",
            autocompletion=complete_adapter_ids,
            callback=adapter_name,
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also delete its aliases, and end its requests with an error.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=60, metavar="SECONDS", help="How long to wait for its requests to finish.")
    ] = 0.0,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Delete adapters or versions. Running requests finish with the version they started with."""
    from api.client import Refused

    refused = []
    with connected(server) as client:
        for reference in references:
            try:
                done = client.delete(reference, force=force, wait_s=wait)
            except Refused as error:
                if len(references) == 1 or error.status == UNAUTHORIZED:
                    raise
                refused.append(str(error))
            else:
                _print_removed(reference, done, as_json)
    if refused:
        raise CliError(f"{len(refused)} of {len(references)} were not removed", details=refused)


def _print_removed(reference: str, done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    say(f"removed {reference} ({counted(done['versions_removed'], 'version')})")
    for alias in done["aliases_removed"]:
        say(f"removed {reference.partition('@')[0]}:{alias}")
    if done["requests_ended"]:
        say(f"ended {counted(done['requests_ended'], 'request')}")
    if done["requests_running"]:
        note(f"{counted(done['requests_running'], 'request')} still running")


def _cells(adapter: dict[str, Any]) -> tuple[str, ...]:
    name = adapter["id"], str(adapter["version"])
    if adapter["digest"] is None:
        return (*name, "no weights", "-", "-", "-")
    current = next(v for v in adapter["versions"] if v["version"] == adapter["version"])
    return (*name, short_digest(adapter["digest"]), str(current["rank"]), current["stored"], size(current["bytes"]))
