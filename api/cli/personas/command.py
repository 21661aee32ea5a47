"""Show and set a persona's defaults (defaults), store sums of adapters (compose), make defaults from other formats
(import-card, import-modelfile), and keep a computed prompt (snapshot)."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adapter_store.composition import parse_sum
from adapter_store.errors import NotComposable
from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import (
    JsonOption,
    ReplicaOption,
    ServerOption,
    adapter_name,
    complete_adapter_ids,
    connected,
)
from api.cli.common.terminal import CliError, ExitCode, note, print_json, say
from api.cli.personas.files import read_defaults, read_from, registered_lines, text_of, to_file
from lorasrv.config import size

ReferenceArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID[@VERSION]", help="A persona.", autocompletion=complete_adapter_ids, callback=adapter_name
    ),
]
IdOption = Annotated[
    str,
    typer.Option(
        "--id", callback=adapter_name, help="Id of the persona: a version of its weights, or a new one of the base."
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the defaults, send nothing.")]


def defaults(
    reference: ReferenceArgument,
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, metavar="FILE", help="Defaults as JSON. Without: print those there are."
        ),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Make the id if it does not exist: a persona of the base, without weights.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Make a version without defaults.")] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Print the defaults of a persona, or make a version with others, of the same weights."""
    if clear and (file is not None or new):
        raise CliError("--clear goes with neither FILE nor --new", code=ExitCode.USAGE)
    if new and file is None:
        raise CliError("--new needs FILE, the defaults of the new persona", code=ExitCode.USAGE)
    if file is None and not clear:
        _print_defaults(reference, server, as_json)
        return
    _set(reference, {} if file is None else read_defaults(file), server, new=new, as_json=as_json)


def compose(
    adapter_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of the sum.", autocompletion=complete_adapter_ids, callback=adapter_name),
    ],
    parts: Annotated[
        list[str],
        typer.Argument(metavar="[WEIGHT*]ADAPTER", help="Adapters with weights: mia 0.5*style@3, or mia+-0.5*style."),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--defaults", exists=True, dir_okay=False, metavar="FILE", help="Defaults of the sum, as JSON."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Store a sum of adapters under an id, as a version that keeps to the versions they have now.

    An existing sum keeps its defaults unless others are given.
    """
    try:
        found = parse_sum("+".join(parts))
    except NotComposable as error:
        raise CliError(str(error), code=ExitCode.USAGE) from None
    adapters = [{"id": reference, "weight": weight} for reference, weight in found]
    with connected(server) as client:
        kept = {} if file is None else read_defaults(file)
        if file is None and (known := client.find_defaults(adapter_id)) is not None:
            kept = known
    _set(adapter_id, {**kept, "adapters": adapters}, server, new=True, as_json=as_json)


def snapshot(
    reference: ReferenceArgument,
    replica: ReplicaOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Keep a persona's computed prompt on the disk, so that its first token comes fast after a restart."""
    with connected(server) as client:
        made = client.make_snapshot(reference, replica)
    if as_json:
        print_json(made)
    else:
        say(f"snapshot of {made['id']}@{made['version']}: {made['tokens']} tokens, {size(made['bytes'])}")


def import_card(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, metavar="FILE", help="Character card, JSON or PNG.")
    ],
    adapter_id: IdOption,
    without_book: Annotated[
        bool, typer.Option("--without-book", help="Leave out the card's character book, which is refused otherwise.")
    ] = False,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Make a persona from a character card of version 2 or 3."""
    from api.cli.personas.card import defaults_of_card

    with read_from(file, "a character card, JSON or PNG") as data:
        found, notices = defaults_of_card(data, without_book=without_book)
    _take(adapter_id, found, notices, server, dry_run=dry_run, as_json=as_json)


def import_modelfile(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, metavar="FILE", help="Ollama Modelfile.")],
    adapter_id: IdOption,
    any_base: Annotated[
        bool, typer.Option("--any-base", help="Accept a FROM that is not the served base by its name.")
    ] = False,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Make a persona from an Ollama Modelfile."""
    from api.cli.personas.modelfile import read_modelfile

    with read_from(file, "an Ollama Modelfile") as data:
        found = read_modelfile(text_of(data))
    if not dry_run and not any_base:
        with connected(server) as client:
            base = client.base_name()
        if not found.is_for(base):
            raise CliError(
                f"the Modelfile is FROM {found.base}, the server's base is {base}; --any-base takes it all the same"
            )
    _take(adapter_id, found.defaults, found.notices, server, dry_run=dry_run, as_json=as_json)


def _take(
    adapter_id: str, found: Mapping[str, Any], notices: Sequence[str], server: str, *, dry_run: bool, as_json: bool
) -> None:
    for notice in notices:
        note(notice)
    if dry_run and as_json:
        print_json(found)
    elif dry_run:
        sys.stdout.write(to_file(found))
    else:
        _set(adapter_id, found, server, new=True, as_json=as_json)


def _set(reference: str, given: Mapping[str, Any], server: str, *, new: bool, as_json: bool) -> None:
    from api.client import Refused

    with connected(server) as client:
        try:
            done = client.set_defaults(reference, given, new=new)
        except Refused as error:
            if new or error.error.get("code") != "model_not_found" or not {"@", ":"}.isdisjoint(reference):
                raise
            raise CliError(f"{error}; --new makes a persona of the base with this id") from None
    if as_json:
        print_json(done)
        return
    for line in registered_lines(done):
        say(line)


def _print_defaults(reference: str, server: str, as_json: bool) -> None:
    with connected(server) as client:
        found = client.defaults(reference)
    if as_json:
        print_json(found)
    elif found["defaults"] is None:
        note(f"{found['id']}@{found['version']} has no defaults")
        sys.stdout.write(to_file({}))
    else:
        sys.stdout.write(to_file(found["defaults"]))
