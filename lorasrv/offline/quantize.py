"""Quantize a base offline for `--quantized-weights`, rounding so that the outputs of linears change least.

The float model reads a text, and the second moments of each linear's inputs are collected. The text may be the model's
own: then none has to be chosen, and it is of the kind that the model writes (LLM-QAT, Liu et al. 2023).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.errors import CorruptModel, UnsupportedFormat
from lorasrv.llm import LLM
from lorasrv.models.loader import Checkpoint
from lorasrv.models.loader.quantized import FEW_LEVELS
from lorasrv.models.quantization import Linear, get_format
from lorasrv.models.quantization.gptq import output_error, round_to_outputs
from lorasrv.models.quantization.rounding import check_group, round_asymmetric
from lorasrv.models.spec import SiteShape
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import LayerWeights, ModelWeights, load_weights
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import GroupQuantizedWeight, Ops

NUM_TEXTS, TEXT_TOKENS = 32, 256
PAGE_SIZE = 16
MAX_MOMENT_BYTES = 2 << 30
CPU = torch.device("cpu")
Progress = Callable[[str, float], None]


def own_texts(model: str, progress: Progress) -> list[list[int]]:
    """Generate texts with the model itself at temperature 1 from random first tokens; deterministic."""
    config = EngineConfig(ModelOptions(), MemoryOptions(pool_bytes=1 << 30))
    with LLM(model, config) as llm:
        draw = random.Random(0)
        first = [draw.randrange(llm.spec.vocab_size) for _ in range(NUM_TEXTS)]
        length = min(TEXT_TOKENS, llm.spec.max_position)
        said: list[list[int]] = []
        for begin in range(0, NUM_TEXTS, 8):
            some = range(begin, begin + 8)
            sampling = [
                SamplingParams(max_tokens=length - 1, temperature=1.0, seed=seed, ignore_eos=True) for seed in some
            ]
            done = llm.generate([[first[i]] for i in some], sampling)
            said += [[first[i], *answer.token_ids] for i, answer in zip(some, done, strict=True)]
            progress("the model writes what it is calibrated with", len(said) / NUM_TEXTS)
    return said


def cut(token_ids: Sequence[int]) -> list[list[int]]:
    """Cut a long text into pieces of `TEXT_TOKENS`."""
    return [list(token_ids[i : i + TEXT_TOKENS]) for i in range(0, len(token_ids), TEXT_TOKENS)]


def moments_of_layers(
    weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield, for each layer, the [H, H] fp32 sum of x xᵀ over all rows of all texts, for each of its sites.

    As many layers are watched at a time as `MAX_MOMENT_BYTES` allow; the texts are read again for each group.
    """
    of_layer = sum(4 * site.in_features**2 for site in weights.spec.sites())
    at_once = max(1, MAX_MOMENT_BYTES // of_layer)
    for first in range(0, len(weights.layers), at_once):
        watched = range(first, min(first + at_once, len(weights.layers)))
        linears = {i: tuple(_Watched(linear) for linear in weights.layers[i].linears()) for i in watched}
        layers = tuple(_with(layer, linears.get(i)) for i, layer in enumerate(weights.layers))
        _read(replace(weights, layers=layers), texts, ops)
        for i in watched:
            yield i, tuple(linear.moments for linear in linears.pop(i))


class _Watched:
    """Wrap a `Linear` and accumulate the second moments of its inputs."""

    can_be_recorded = False

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.in_features, self.out_features, self.nbytes = linear.in_features, linear.out_features, linear.nbytes
        self.moments = torch.zeros(linear.in_features, linear.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        self.moments.addmm_(x.T, x)
        return self._linear(x)

    def dequantize(self) -> Tensor:
        return self._linear.dequantize()


def _with(layer: LayerWeights, linears: tuple[_Watched, ...] | None) -> LayerWeights:
    if linears is None:
        return layer
    qkv, o, gate_up, down = linears
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


def _read(weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops) -> None:
    longest = max(map(len, texts))
    pages = -(-longest // PAGE_SIZE)
    memory = DevicePool(weights.spec, pages, PAGE_SIZE, KV_FORMATS["float32"], CPU)
    decoder = Decoder(weights, memory, DecoderLimits(longest, longest, 1, torch.float32), ops)
    for text in texts:
        share = ScheduledRequest(
            RequestId("text"), tuple(text), 0, tuple(range(pages)), None, False, SamplingParams(), 0
        )
        decoder.forward(build_batch(SchedulerOutput((share,), {}, (), AdapterOrders(), 0), memory, torch.float32, ops))


@dataclass(frozen=True, slots=True)
class Quantized:
    """Hold quantized weights, with the mean change of linear outputs as a share of their energy."""

    # By weight name.
    codes: Mapping[str, GroupQuantizedWeight]
    error: float
    # The change if each weight were rounded to the nearest code.
    error_of_rounding: float


def check_format(checkpoint: Checkpoint, quantization: str, group: int) -> None:
    """Check that the format quantizes to few levels and the group divides each linear's inputs.

    Raises:
        UnsupportedFormat: names the option and the choices.
    """
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
        texts: token ids that the float model reads to collect the inputs of linears; none longer than its context.

    Raises:
        UnsupportedFormat: see `check_format`.
        CorruptModel: a tensor cannot be read, or the model's outputs are not finite.
    """
    check_format(checkpoint, quantization, group)
    ops = Ops(CPU)
    weights = load_weights(checkpoint, get_format("none", ops), torch.float32, progress=progress)
    codes: dict[str, GroupQuantizedWeight] = {}
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
    """Yield the weights of a site under their own names."""
    for module, weight in zip(site.modules, torch.split(stacked, list(site.out_features)), strict=True):
        yield f"model.layers.{layer}.{module}.weight", weight
