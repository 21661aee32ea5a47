"""Quantize a model's linears to 4 or 3.5 bits for serve --quantized-weights (quantize)."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.common.options import JsonOption
from api.cli.common.terminal import CliError, ExitCode, note, print_json, progress, say
from lorasrv.config import BUILTIN_MODEL

if TYPE_CHECKING:
    from lorasrv.models.loader import Checkpoint
    from lorasrv.offline.quantize import Quantized

Progress = Callable[[str, float], None]


def quantize(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, e.g. model-int4.safetensors.")],
    model: Annotated[
        str, typer.Option(help="Built-in name, .gguf file, Hugging Face folder or hf:org/name, best in 16 bits.")
    ] = BUILTIN_MODEL,
    quantization: Annotated[str, typer.Option(help="int4 or q3h.")] = "int4",
    quantization_group: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 64,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="TXT", help="Calibration text, like the text to be served. [default: the model writes some]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize a model's linears so that their outputs change least (GPTQ); takes minutes.

    Example: lorasrv quantize llama-int4.safetensors --model ./Llama-3.2-1B;
    lorasrv serve --model ./Llama-3.2-1B --quantized-weights llama-int4.safetensors
    """
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.loader.quantized import write_codes
    from lorasrv.offline.quantize import check_format
    from lorasrv.offline.quantize import quantize as rounded

    _check_output(output, force)
    begun = time.monotonic()
    with closing(open_checkpoint(model)) as checkpoint:
        check_format(checkpoint, quantization, quantization_group)
        if checkpoint.codes("model.layers.0.mlp.down_proj.weight") is not None:
            note("this model is already quantized; the 16-bit model would give a better result")
        with progress() as step:
            bar: Progress = lambda what, done: step(_plain(what), done, 1.0)  # noqa: E731
            texts = _texts(text, model, checkpoint, bar)
            made = rounded(checkpoint, quantization, quantization_group, texts, bar)
        write_codes(output, checkpoint, quantization, made.codes)
    _report(output, made, time.monotonic() - begun, as_json)


def _check_output(output: Path, force: bool) -> None:
    """Check that the file can be written before spending minutes."""
    folder = output.absolute().parent
    if output.exists() and not force:
        raise CliError(f"{output} exists; --force replaces it", code=ExitCode.USAGE)
    if output.is_dir():
        raise CliError(f"{output} is a folder; name a file", code=ExitCode.USAGE)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CliError(f"{folder} is not a writable folder", code=ExitCode.USAGE)


def _plain(what: str) -> str:
    """Return one label for loading all layers."""
    return "loading weights" if what.startswith("load") else what


def _texts(text: Path | None, model: str, checkpoint: "Checkpoint", bar: Progress) -> list[list[int]]:
    from lorasrv.offline.quantize import NUM_TEXTS, TEXT_TOKENS, cut, own_texts

    if text is None:
        return own_texts(model, bar)
    from lorasrv.text.tokenizer import Tokenizer

    try:
        content = text.read_text("utf-8")
    except UnicodeDecodeError:
        raise CliError(f"--text {text} is not UTF-8") from None
    token_ids = Tokenizer.from_source(checkpoint.tokenizer_source()).encode(content, add_special_tokens=False)
    wanted = NUM_TEXTS * TEXT_TOKENS
    if len(token_ids) < wanted // 4:
        raise CliError(
            f"--text {text} has {len(token_ids)} tokens; at least {wanted // 4} are needed, {wanted} are used"
        )
    return cut(token_ids[:wanted])


def _report(output: Path, made: "Quantized", seconds: float, as_json: bool) -> None:
    nbytes = output.stat().st_size
    if as_json:
        facts = {"file": str(output), "bytes": nbytes, "seconds": round(seconds, 1)}
        errors = {"output_error": made.error, "output_error_of_rounding": made.error_of_rounding}
        print_json({**facts, **errors})
        return
    say(f"wrote {output}: {nbytes / 2**20:.0f} MiB in {seconds:.0f} s")
    say(
        f"  the outputs of linears change by {made.error**0.5:.1%} (root mean square); "
        f"plain rounding: {made.error_of_rounding**0.5:.1%}"
    )
