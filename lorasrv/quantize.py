"""Offline quantization: weights rounded so that what linears compute changes least, for `--quantized-weights`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lorasrv.calibration import CPU, Progress, moments_of_layers
from lorasrv.errors import CorruptModel, UnsupportedFormat
from lorasrv.loaders import Checkpoint
from lorasrv.loaders.codes_file import FEW_LEVELS
from lorasrv.models.spec import SiteShape
from lorasrv.models.weights import load_weights
from lorasrv.quant import get_format
from lorasrv.quant.gptq import output_error, round_to_outputs
from lorasrv.quant.rounding import check_group, round_asymmetric
from sgmv_kernels.ops import GroupCodes, Ops


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes by the names of weights, and how much the outputs of linears change, as parts of their energy: on the mean,
    and had every weight just been rounded to the nearest code.
    """

    codes: Mapping[str, GroupCodes]
    error: float
    error_of_rounding: float


def check_format(checkpoint: Checkpoint, quantization: str, group: int) -> None:
    """Raises: UnsupportedFormat: no format of few bits, or a group that it has not or that does not divide."""
    if quantization not in FEW_LEVELS:
        raise UnsupportedFormat(f"--quantization {quantization!r:.60}: choose from {', '.join(FEW_LEVELS)}")
    get_format(quantization, Ops(CPU, "torch"), group)
    for site in checkpoint.spec.sites():
        check_group(torch.empty((0, site.in_features)), group, "--quantization-group")


@torch.inference_mode()
def quantize(
    checkpoint: Checkpoint, quantization: str, group: int, texts: Sequence[Sequence[int]], progress: Progress
) -> Quantized:
    """Round every linear of the layers.

    Args:
        quantization: int4 or q3h.
        texts: token ids that the float model reads, to see what its linears are given; none longer than its context.
    Raises:
        UnsupportedFormat: as `check_format`.
        CorruptModel: a tensor cannot be read, or the model computes no numbers.
    """
    check_format(checkpoint, quantization, group)
    ops = Ops(CPU)
    weights = load_weights(checkpoint, get_format("none", ops), torch.float32, progress=progress)
    codes: dict[str, GroupCodes] = {}
    errors: list[tuple[float, float]] = []
    progress("reading the text", 0.0)
    for layer, moments in moments_of_layers(weights, texts, ops):
        linears = weights.layers[layer].linears()
        for site, linear, moment in zip(weights.spec.sites(), linears, moments, strict=True):
            for name, weight in _parts(layer, site, linear.dequantize()):
                try:
                    rounded = round_to_outputs(weight, moment, group, FEW_LEVELS[quantization])
                except ValueError as error:
                    raise CorruptModel(f"{name}: {error}") from None
                codes[name] = rounded.codes
                nearest = round_asymmetric(weight, group, FEW_LEVELS[quantization])
                errors.append((rounded.error, output_error(nearest, weight, moment)))
        progress("rounding layers", (layer + 1) / len(weights.layers))
    means = torch.tensor(errors).mean(dim=0).tolist()
    return Quantized(codes, means[0], means[1])


def _parts(layer: int, site: SiteShape, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a site by their own names."""
    for module, weight in zip(site.modules, torch.split(stacked, list(site.out_features)), strict=True):
        yield f"model.layers.{layer}.{module}.weight", weight
