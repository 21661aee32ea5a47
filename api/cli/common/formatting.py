"""Format sizes, reports and limits for people, and define arguments that commands on adapters share."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from adapter_store.formats.peft_dir import PeftDir
from adapter_store.spec import BF16, FORMS, INT8, Form
from api.cli.common.options import existing_folder
from lorasrv.config import size


def found_lines(peft: PeftDir) -> list[str]:
    """Format where the adapter was found, what was converted, and which files are ignored."""
    lines = [f"found in sub-folder {peft.subdirectory}"] if peft.subdirectory else []
    ignored = [f"not used: {', '.join(peft.ignored_files)}"] if peft.ignored_files else []
    return [*lines, *peft.notices, *ignored]


def found_facts(peft: PeftDir) -> dict[str, Any]:
    """Return the content of `found_lines` as JSON data."""
    return {
        "subdirectory": peft.subdirectory,
        "converted": list(peft.notices),
        "ignored_files": list(peft.ignored_files),
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """Format an upload report; no lines without weights."""
    if not report:
        return []
    ranks = _range(report["rank_min"], report["rank_max"])
    norm = f", norm of B {report['norm_b']:.4g}" if report.get("norm_b") is not None else ""
    scaling = _range(f"{report['scaling_min']:g}", f"{report['scaling_max']:g}")
    layers, drift = counted(report["layers"], "layer"), report.get("drift")
    return [
        f"{report['modules_matched']} of {report['modules_expected']} modules matched in {layers}, "
        f"rank {ranks}, scaling {scaling}, {report['dtype']}, {size(report['weights_bytes'])}{norm}",
        *([] if drift is None else [drift_line(drift)]),
        *(f"notice: {notice}" for notice in report.get("notices") or ()),
        *(f"warning: {warning}" for warning in report["warnings"]),
    ]


def drift_line(drift: dict[str, Any]) -> str:
    """Format how much int8 changes an adapter."""
    worst = f", by {100 * drift['worst']:.2f} % at most ({drift['worst_module']})" if drift["worst"] else ""
    return f"stored as int8, which changes it by {100 * drift['rms']:.2f} %{worst}"


def limits_line(limits: dict[str, Any]) -> str:
    """Format limits."""
    shown = (f"{name} {size(value) if name == 'resident_bytes' else f'{value:.10g}'}" for name, value in limits.items())
    return ", ".join(shown) or "no limits of its own"


def verdict_line(verdict: dict[str, Any] | None) -> str:
    """Format the last verification of the current version."""
    if verdict is None:
        return "never verified (lorasrv verify)"
    when = datetime.fromtimestamp(verdict["created"], UTC)
    error = verdict["adapter_error"]
    return (
        f"verified {when:%Y-%m-%d %H:%M} UTC: {verdict['verdict']}, logits off by at most {error['max_abs']:.3g}, "
        f"{error['mean_abs']:.3g} on average"
    )


def target_text(adapter_id: str, target: int | dict[str, float]) -> str:
    """Format an alias's target: `mia@3`, or `mia@3 90 %, mia@4 10 %`."""
    if isinstance(target, int):
        return f"{adapter_id}@{target}"
    return ", ".join(f"{adapter_id}@{version} {100 * share:g} %" for version, share in target.items())


def utc(unix_s: float) -> str:
    """Format a moment."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def counted(number: int, what: str, plural: str | None = None) -> str:
    return f"{number} {what if number == 1 else plural or f'{what}s'}"


def _range(low: object, high: object) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _form(text: str) -> Form:
    if text not in FORMS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(FORMS)}")
    return INT8 if text == INT8 else BF16


DirectoryArgument = Annotated[
    Path,
    typer.Argument(
        exists=True, file_okay=False, metavar="DIR", help="Folder written by PEFT's save_pretrained(), or by MLX."
    ),
]
PartialOption = Annotated[
    bool, typer.Option("--allow-partial", help="Accept it although modules named in its config have no tensors.")
]


StoredOption = Annotated[
    Form | None,
    typer.Option(
        "--stored",
        metavar="FORM",
        parser=_form,
        help="Keep it in bf16, or in int8: half the memory, a change of about 0.7 %. By default as the server is set "
        "(--adapter-storage).",
        show_default=False,
    ),
]
NoTokenizerOption = Annotated[
    bool, typer.Option("--no-tokenizer", help="Ignore the folder's tokenizer.json and the tokens that it adds.")
]
DriftOption = Annotated[
    bool, typer.Option("--allow-drift", help="Accept int8 although it changes the adapter by more than 10 %.")
]
DefaultsOption = Annotated[
    Path | None,
    typer.Option(
        "--defaults",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        help="JSON file of defaults for what requests leave out: system prompt, sampling, stops and more.",
        show_default=False,
    ),
]

# Not read from LORASRV_STORE, which is serve's store: list asks the server unless --store is given.
ClosedStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        callback=existing_folder,
        metavar="DIR",
        help="A store that no server uses.",
        show_default=False,
    ),
]
