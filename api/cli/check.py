"""check: the server's validator without a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapter_store.errors import AdapterInvalid
from adapter_store.peft_dir import read_peft_dir
from adapter_store.spec import BaseShapes
from api.cli.adapters import found_lines, report_lines
from api.cli.console import note, print_json, say, short_digest
from api.cli.options import JsonOption
from lorasrv.config import BUILTIN_MODEL, MemoryOptions

if TYPE_CHECKING:
    from adapter_store.report import UploadReport


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that PEFT's save_pretrained() wrote.")],
    model: Annotated[str, typer.Option(help="Base that it must fit.")] = BUILTIN_MODEL,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Highest rank to accept.")] = MemoryOptions().max_lora_rank,
    as_json: JsonOption = False,
) -> None:
    """Say whether a server with this base would take the adapter, and every reason why not. Nothing is sent."""
    from adapter_store.validate import check_files

    try:
        peft = read_peft_dir(directory)
        checked = check_files(peft.config, peft.weights_path, _shapes(model), max_lora_rank)
    except AdapterInvalid as error:
        if as_json:
            print_json({"ok": False, "problems": [problem.to_dict() for problem in error.problems]})
        raise
    for line in found_lines(peft):
        note(line)
    _print(checked.report, as_json)


def _shapes(model: str) -> BaseShapes:
    from dataclasses import replace

    from lorasrv.base_shapes import base_shapes
    from lorasrv.loaders import open_checkpoint

    checkpoint = open_checkpoint(model)
    try:
        return replace(base_shapes(checkpoint.spec), name=checkpoint.name)
    finally:
        checkpoint.close()


def _print(report: "UploadReport", as_json: bool) -> None:
    facts = report.to_dict()
    if as_json:
        print_json({"ok": True, "report": facts})
        return
    say(f"ok  {short_digest(report.digest)}")
    for line in report_lines(facts):
        say(f"  {line}")
