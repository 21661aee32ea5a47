"""Detect a server's watermark in a text (watermark detect), without a server and without torch."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.options import JsonOption
from api.cli.common.terminal import CliError, ExitCode, print_json, say, stdin_text
from lorasrv.config import BUILTIN_MODEL
from lorasrv.sampling_params import DEFAULT_KEY, Watermark

if TYPE_CHECKING:
    from lorasrv.sampling.watermark import Detection

app = typer.Typer(help="Detect the watermark in text generated with watermark: true.", no_args_is_help=True)
DEFAULT_THRESHOLD = 4.0
_SAYS = {"watermarked": "watermarked", "not_watermarked": "no watermark found", "too_short": "too short to tell"}


@app.callback()
def _group() -> None:
    """Keep `detect` a separate command."""


def detect_watermark(
    text: Annotated[str, typer.Option(metavar="FILE", help="File of the text, UTF-8; - reads it from stdin.")] = "-",
    model: Annotated[str, typer.Option(help="Base that generated it, whose tokenizer is needed.")] = BUILTIN_MODEL,
    gamma: Annotated[
        float, typer.Option("--watermark-gamma", envvar="LORASRV_WATERMARK_GAMMA", help="As set on the server.")
    ] = Watermark().gamma,
    key: Annotated[
        int,
        typer.Option(
            "--watermark-key", envvar="LORASRV_WATERMARK_KEY", show_default=False, help="As set on the server."
        ),
    ] = DEFAULT_KEY,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="z-score above which a text counts as watermarked.")
    ] = DEFAULT_THRESHOLD,
    as_json: JsonOption = False,
) -> None:
    """Report how many tokens are green, how likely that is by chance (z-score and p-value), and the verdict."""
    watermark = Watermark(gamma=gamma, key=key)
    written = _read(text)

    from lorasrv.models.loader.locate import read_tokenizer
    from lorasrv.sampling.watermark import detect

    token_ids = read_tokenizer(model).encode(written, add_special_tokens=False)
    found = detect(token_ids, watermark, threshold)
    if as_json:
        print_json({**asdict(found), "tokens": len(token_ids), "gamma": gamma, "threshold": threshold})
    else:
        _print(found, gamma, threshold)


def _read(source: str) -> str:
    try:
        return stdin_text() if source == "-" else Path(source).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"--text: the text is not UTF-8 (byte {error.start})", code=ExitCode.USAGE) from None
    except OSError as error:
        raise CliError(f"--text: {source} cannot be read: {error.strerror}", code=ExitCode.USAGE) from None


def _print(found: "Detection", gamma: float, threshold: float) -> None:
    share = f"{100 * found.green / found.scored:.1f} %" if found.scored else "none"
    say(f"{_SAYS[found.verdict]}")
    say(f"  green    {found.green} of {found.scored} pairs of tokens ({share}; {100 * gamma:g} % by chance)")
    say(f"  z-score  {found.z_score:.2f} (threshold {threshold:g})")
    say(f"  p-value  {found.p_value:.2g}")
