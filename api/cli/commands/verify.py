"""Let a running server compare one of its adapters with PEFT (verify)."""

from pathlib import Path
from typing import Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import JsonOption, ServerOption, adapter_name, complete_adapter_ids, connected
from api.cli.common.terminal import CliError, ExitCode, print_json, print_table, progress, say, short_digest
from lorasrv.config import size


def verify(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="ID[@VERSION]",
            help="An adapter, or one version of it.",
            autocompletion=complete_adapter_ids,
            callback=adapter_name,
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, metavar="FILE", help=r"Prompts, one per line. \[default: four built-in ones]"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help=r"Give up after this time. \[default: 300]")
    ] = None,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Start even if memory is likely to run out.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Compare a stored adapter's outputs on the server with PEFT's. Exit code 1 if they differ."""
    body: dict[str, Any] = {"ignore_memory": ignore_memory}
    if prompts is not None:
        body["prompts"] = _read_prompts(prompts)
    if timeout is not None:
        body["timeout_s"] = timeout
    verdict: dict[str, Any] = {}
    with connected(server, flags={"timeout_s": "--timeout", "prompts": "--prompts"}) as client, progress() as step:
        for event in client.verify(reference, body):
            if "progress" in event:
                what, done = event["progress"]
                step(what, done, 1.0)
            else:
                verdict = dict(event)
    if as_json:
        print_json(verdict)
    else:
        _print(verdict)
    if verdict["verdict"] == "differs":
        raise CliError(f"{verdict['id']} differs from PEFT: {'; '.join(verdict['reasons'])}")


def _read_prompts(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        why = f"--prompts: {file} is not UTF-8 (byte {error.start})"
        raise CliError(why, code=ExitCode.USAGE) from None
    if not any(lines):
        raise CliError(f"--prompts: {file} has no line with a prompt", code=ExitCode.USAGE)
    return [line for line in lines if line]


def _print(verdict: dict[str, Any]) -> None:
    base, linears, effect = verdict["computed_with"], verdict["linears"], verdict["effect"]
    say(f"{verdict['id']}@{verdict['version']}  {short_digest(verdict['digest'])}  {verdict['verdict']}")
    say(f"  base {base['model']}: {base['quantization']}, adapters {base['dtype']}, {base['kernels']} kernels")
    rows = [
        _row("error with the adapter", verdict["adapter_error"]),
        _row("error without", verdict["base_error"]),
        ("effect of the adapter", *(f"{effect[key]:.3g}" for key in ("max_abs", "mean_abs", "rms")), "", ""),
    ]
    print_table(("logits", "largest", "mean", "rms", "largest, relative", "same token"), rows)
    say(
        f"  linears: {linears['adapted']} of {linears['compared']} adapted, the worst off by "
        f"{linears['max_error']:.3g} ({linears['worst']}); up to {linears['limit']:g} is rounding"
    )
    positions = verdict["adapter_error"]["positions"]
    say(f"  {effect['tokens_changed']} of {positions} likeliest tokens change with the adapter")
    for note in verdict["notes"]:
        say(f"  note: {note}")
    took = f"{verdict['seconds']:.1f} s, {verdict['cpu_seconds']:.1f} s of one processor"
    say(f"  took {took}, and {size(verdict['peak_bytes'])}")


def _row(title: str, errors: dict[str, Any]) -> tuple[str, ...]:
    same = f"{errors['greedy_equal']} of {errors['positions']}"
    return (title, *(f"{errors[key]:.3g}" for key in ("max_abs", "mean_abs", "rms", "max_relative")), same)
