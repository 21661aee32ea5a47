"""check: the server's validator without a server."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.adapter_dir import open_adapter_dir
from adapter_store.errors import AdapterInvalid
from adapter_store.spec import BaseShapes
from api.cli.adapters import DirectoryArgument, PartialOption, found_facts, found_lines, report_lines
from api.cli.console import note, print_json, say, short_digest
from api.cli.options import JsonOption
from lorasrv.config import BUILTIN_MODEL, MemoryOptions

if TYPE_CHECKING:
    from adapter_store.report import UploadReport


def check(
    directory: DirectoryArgument,
    model: Annotated[str, typer.Option(help="Base that it must fit.")] = BUILTIN_MODEL,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Highest rank to accept.")] = MemoryOptions().max_lora_rank,
    allow_partial: PartialOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a server with this base would take the adapter, and every reason why not.

    Nothing is sent, and of the base only the configuration is read.
    """
    from adapter_store.validate import check_files

    try:
        with open_adapter_dir(directory) as peft:
            checked = check_files(
                peft.config, peft.weights_path, shapes_of(model), max_lora_rank, allow_partial=allow_partial
            )
    except AdapterInvalid as error:
        if as_json:
            print_json({"ok": False, "problems": [problem.to_dict() for problem in error.problems]})
        raise
    for line in found_lines(peft):
        note(line)
    _print(checked.report, found_facts(peft), as_json)


def shapes_of(model: str) -> BaseShapes:
    """What an adapter of this base must fit, from the model's header alone. Raises: LorasrvError."""
    from lorasrv.base_shapes import base_shapes
    from lorasrv.loaders.model_shape import read_model_shape

    shape = read_model_shape(model)
    return base_shapes(shape.spec, shape.name)


def _print(report: "UploadReport", found: dict[str, Any], as_json: bool) -> None:
    facts = report.to_dict()
    if as_json:
        print_json({"ok": True, "report": facts, **found})
        return
    say(f"ok  {short_digest(report.digest)}")
    for line in report_lines(facts):
        say(f"  {line}")
