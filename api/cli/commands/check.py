"""Validate an adapter without a server, as a server would (check)."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.spec import BF16, MAX_LORA_RANK, AdapterKey, BaseShapes
from api.cli.common.formatting import (
    ClosedStoreOption,
    DirectoryArgument,
    DriftOption,
    NoTokenizerOption,
    PartialOption,
    StoredOption,
    found_facts,
    found_lines,
    report_lines,
)
from api.cli.common.options import JsonOption
from api.cli.common.terminal import CliError, note, print_json, say, short_digest
from lorasrv.config import BUILTIN_MODEL

if TYPE_CHECKING:
    from adapter_store.validation.report import UploadReport


def check(
    directory: DirectoryArgument,
    model: Annotated[str, typer.Option(help="Base that the adapter must fit.")] = BUILTIN_MODEL,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, max=MAX_LORA_RANK, help="Highest rank to accept.")
    ] = MAX_LORA_RANK,
    allow_partial: PartialOption = False,
    stored: StoredOption = None,
    allow_drift: DriftOption = False,
    no_tokenizer: NoTokenizerOption = False,
    store: ClosedStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether a server with this base would accept the adapter, and list all problems.

    Nothing is sent, and only the base's configuration is read. With --store, also list the store's versions with the
    same content; the base must be the store's.
    """
    from adapter_store.validation.validate import check_files
    from lorasrv.models.loader.locate import read_tokenizer
    from lorasrv.text.own_tokenizers import with_own_tokens

    base = shapes_of(model)
    versions = _versions(store, base) if store is not None else None
    try:
        with open_adapter_dir(directory) as found:
            peft = found if no_tokenizer else with_own_tokens(found, partial(read_tokenizer, model))
            terms = {"allow_partial": allow_partial, "stored": stored or BF16, "allow_drift": allow_drift}
            checked = check_files(peft.config, peft.weights_path, base, max_lora_rank, **terms)
    except AdapterInvalid as error:
        if as_json:
            print_json({"ok": False, "problems": [problem.to_dict() for problem in error.problems]})
        raise
    for line in found_lines(peft):
        note(line)
    facts = found_facts(peft)
    if versions is not None:
        facts |= {"in_store": versions.get(checked.report.digest, [])}
    _print(checked.report, facts, as_json)


def shapes_of(model: str) -> BaseShapes:
    """Return the shapes that an adapter of this base must fit; reads only the model's header.

    Raises: LorasrvError.
    """
    from lorasrv.models.loader.locate import checkpoint_name, read_model_shape
    from lorasrv.models.lora_sites import base_shapes

    shape = read_model_shape(model)
    return base_shapes(shape.spec, shape.name, checkpoint_name(model))


def _versions(root: Path, base: BaseShapes) -> dict[AdapterKey, list[str]]:
    """Return the store's versions by content.

    Raises:
        CliError: the store belongs to another base.
        AdapterError.
    """
    from adapter_store.maintenance.offline_store import OfflineStore
    from adapter_store.registry.base_identity import BaseIdentity, stored_base

    with OfflineStore(root) as closed:
        filled_for = stored_base(closed.index)
        records = closed.index.records()
    if filled_for.shapes and not filled_for.has_shapes_of(BaseIdentity.of(base)):
        raise CliError(f"{root} belongs to a base of other shapes than {base.name}; name that base with --model")
    found: dict[AdapterKey, list[str]] = {}
    for _, record in sorted(records.items()):
        for version in record.versions:
            if version.key is not None:
                found.setdefault(version.key, []).append(f"{record.adapter_id}@{version.version}")
    return found


def _print(report: "UploadReport", found: dict[str, Any], as_json: bool) -> None:
    facts = report.to_dict()
    if as_json:
        print_json({"ok": True, "report": facts, **found})
        return
    say(f"ok  {short_digest(report.digest)}")
    for line in report_lines(facts):
        say(f"  {line}")
    if found.get("in_store"):
        say(f"  in the store already: {', '.join(found['in_store'])}")
