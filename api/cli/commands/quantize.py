"""Quantize a model's linears to few bits for serve --quantized-weights (quantize)."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.options import JsonOption
from api.cli.common.terminal import CliError, ExitCode, note, print_json, print_table, progress, say
from lorasrv.config import BUILTIN_MODEL

if TYPE_CHECKING:
    from lorasrv.models.loader import Checkpoint
    from lorasrv.models.loader.quantized import SiteFormats
    from lorasrv.models.spec import ModelSpec
    from lorasrv.offline.quantize import Quantized

Progress = Callable[[str, float], None]
DEFAULT_GROUP = 64


def quantize(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, e.g. model-int4.safetensors.")],
    model: Annotated[
        str, typer.Option(help="Built-in name, .gguf file, Hugging Face folder or hf:org/name, best in 16 bits.")
    ] = BUILTIN_MODEL,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="int4, q3h, or formats by part (attn, mlp, qkv, o, gate_up, down), e.g. attn=int4,mlp=q3h:128. "
            "[default: int4]",
        ),
    ] = None,
    quantization_group: Annotated[
        int | None, typer.Option(metavar="N", help="Weights that share a scale: 32, 64 or 128. [default: 64]")
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            metavar="BITS",
            help="Mean bits per code, e.g. 3.8: measures which linears tolerate few bits, and chooses the formats.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="TXT",
            help="Calibration text, like the text to be served. [default: the model writes some]",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize a model's linear layers with GPTQ, which minimizes the change of their outputs. Takes minutes.

    Example: lorasrv quantize llama-int4.safetensors --model ./Llama-3.2-1B;
    lorasrv serve --model ./Llama-3.2-1B --quantized-weights llama-int4.safetensors
    """
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.loader.quantized import write_codes
    from lorasrv.offline.bits import check_bits, choose_formats
    from lorasrv.offline.quantize import load_floats, read_formats
    from lorasrv.offline.quantize import quantize as rounded

    _check_output(output, force)
    if bits is not None and (quantization, quantization_group) != (None, None):
        why = "--bits chooses formats and groups; leave out --quantization and --quantization-group"
        raise CliError(why, code=ExitCode.USAGE)
    begun = time.monotonic()
    with closing(open_checkpoint(model)) as checkpoint:
        formats: SiteFormats = {}
        harms: Mapping[str, float] | None = None
        if bits is not None:
            check_bits(checkpoint.spec, bits)
        else:
            formats = read_formats(checkpoint, quantization or "int4", quantization_group or DEFAULT_GROUP)
        if checkpoint.codes("model.layers.0.mlp.down_proj.weight") is not None:
            note("this model is already quantized; the 16-bit model would give a better result")
        with progress() as step:
            bar: Progress = lambda what, done: step(_plain(what), done, 1.0)  # noqa: E731
            texts = _texts(text, model, checkpoint, bar)
            weights = load_floats(checkpoint, bar)
            if bits is not None:
                chosen = choose_formats(weights, bits, texts, bar)
                formats, harms = chosen.formats, chosen.harms
            made = rounded(weights, formats, texts, bar)
        write_codes(output, checkpoint, formats, made.codes)
        sites = _sites(checkpoint.spec, made, harms)
    _report(output, made, sites, time.monotonic() - begun, as_json)


def _check_output(output: Path, force: bool) -> None:
    """Check that the file can be written, before computing for minutes."""
    folder = output.absolute().parent
    if output.exists() and not force:
        raise CliError(f"{output} exists; --force replaces it", code=ExitCode.USAGE)
    if output.is_dir():
        raise CliError(f"{output} is a folder; name a file", code=ExitCode.USAGE)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CliError(f"{folder} is not a writable folder", code=ExitCode.USAGE)


def _plain(what: str) -> str:
    """Return the label of a progress step; all layers share one label."""
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


def _sites(spec: "ModelSpec", made: "Quantized", harms: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Describe each kind of linear layer, and at the end all of them together.

    Each entry has the formats with their number of layers, bits per weight including scales, change of the outputs, and
    the share of the divergence if it was measured.
    """
    layers = [{site.name: site.size for site in spec.sites_of(layer)} for layer in range(spec.num_layers)]
    sizes = {site: sum(layer[site] for layer in layers) for site in made.formats}
    bits = {
        site: sum(form.bits * layer[site] for form, layer in zip(forms, layers, strict=True)) / sizes[site]
        for site, forms in made.formats.items()
    }
    whole = sum(harms.values()) if harms else 0.0
    rows: list[dict[str, Any]] = [
        {
            "site": site,
            "formats": {str(form): count for form, count in sorted(Counter(forms).items(), key=lambda f: -f[0].bits)},
            "bits": round(bits[site], 3),
            "output_error": made.site_errors[site],
            "kl_share": round(harms[site] / whole, 4) if harms and whole else None,
        }
        for site, forms in made.formats.items()
    ]
    mean = sum(bits[site] * size for site, size in sizes.items()) / spec.linear_weights
    return [*rows, {"site": "all", "bits": round(mean, 3), "output_error": made.error}]


def _report(output: Path, made: "Quantized", sites: Sequence[Mapping[str, Any]], seconds: float, as_json: bool) -> None:
    nbytes = output.stat().st_size
    if as_json:
        facts = {"file": str(output), "bytes": nbytes, "seconds": round(seconds, 1)}
        errors = {"output_error": made.error, "output_error_of_rounding": made.error_of_rounding}
        print_json({**facts, **errors, "sites": sites})
        return
    say(f"wrote {output}: {nbytes / 2**20:.0f} MiB in {seconds:.0f} s")
    print_table(("site", "formats (layers)", "bits", "output change", "KL share"), [_row(site) for site in sites])
    say(
        f"  the outputs of linears change by {made.error**0.5:.1%} (root mean square); "
        f"plain rounding: {made.error_of_rounding**0.5:.1%}"
    )


def _row(site: Mapping[str, Any]) -> tuple[str, ...]:
    formats = ", ".join(f"{form} ({count})" for form, count in site.get("formats", {}).items())
    share = site.get("kl_share")
    change = f"{site['output_error'] ** 0.5:.1%}"
    return site["site"], formats, f"{site['bits']:.2f}", change, "" if share is None else f"{share:.0%}"
