"""Quantize a base offline for `--quantized-weights`, rounding so that the outputs of linears change least.

The float model reads a text, and the second moments of each linear's inputs are collected. The model itself may
generate the text: then none has to be chosen, and it resembles the model's output (LLM-QAT, Liu et al. 2023).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.errors import CorruptModel, UnsupportedFormat
from lorasrv.llm import LLM
from lorasrv.models.code_format import LEVELS, CodeFormat, names_parts, parse_parts
from lorasrv.models.loader import Checkpoint
from lorasrv.models.loader.quantized import FEW_BITS, SiteFormats
from lorasrv.models.quantization import Linear, get_format
from lorasrv.models.quantization.gptq import output_error, round_to_outputs
from lorasrv.models.quantization.rounding import check_group, round_asymmetric, round_symmetric
from lorasrv.models.spec import SiteShape
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import LayerWeights, ModelWeights, load_weights
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

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

    As many layers are collected at a time as `MAX_MOMENT_BYTES` allow; the texts are read again for each group.
    """
    of_layer = sum(4 * site.in_features**2 for site in weights.spec.sites_of(0))
    at_once = max(1, MAX_MOMENT_BYTES // of_layer)
    for first in range(0, len(weights.layers), at_once):
        watched = range(first, min(first + at_once, len(weights.layers)))
        linears = {i: tuple(_Watched(linear) for linear in weights.layers[i].linears()) for i in watched}
        layers = tuple(with_linears(layer, linears.get(i) or layer.linears()) for i, layer in enumerate(weights.layers))
        for _ in passes(replace(weights, layers=layers), texts, ops):
            pass
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

    def rows(self, ids: Tensor) -> Tensor:
        return self._linear.rows(ids)


def with_linears(layer: LayerWeights, linears: Sequence[Linear]) -> LayerWeights:
    """Return a layer with other linears, in the order of `ModelSpec.sites_of`."""
    qkv, o, gate_up, down = linears
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


def passes(
    weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops, *, wants_logits: bool = False
) -> Iterator[Tensor]:
    """Compute texts, one pass each; yield the logits of all rows [T, V] fp32, valid until the next pass, or none."""
    longest = max(map(len, texts))
    pages = -(-longest // PAGE_SIZE)
    memory = DevicePool(weights.spec, pages, PAGE_SIZE, KV_FORMATS["float32"], CPU)
    decoder = Decoder(weights, memory, DecoderLimits(longest, longest, longest, torch.float32), ops)
    for text in texts:
        scheduled = ScheduledRequest(
            RequestId("text"), tuple(text), 0, tuple(range(pages)), None, wants_logits, SamplingParams(), 0
        )
        batch = build_batch(SchedulerOutput((scheduled,), {}, (), AdapterOrders(), 0), memory, torch.float32, ops)
        rows = torch.arange(len(text)) if wants_logits else batch.tables.sample_rows
        yield decoder.forward(replace(batch, tables=replace(batch.tables, sample_rows=rows)))


@dataclass(frozen=True, slots=True)
class Quantized:
    """Hold quantized weights, with the mean change of linear outputs as a share of their energy."""

    # By weight name.
    codes: Mapping[str, GroupQuantizedWeight]
    formats: SiteFormats
    # The mean change by site, and that of all linears.
    site_errors: Mapping[str, float]
    error: float
    # The change if each weight were rounded to the nearest code.
    error_of_rounding: float


def load_floats(checkpoint: Checkpoint, progress: Progress) -> ModelWeights:
    """Load a model unchanged, in fp32.

    Raises:
        CorruptModel: a tensor cannot be read.
    """
    return load_weights(checkpoint, get_format("none", Ops(CPU)), torch.float32, progress=progress)


def read_formats(checkpoint: Checkpoint, quantization: str, group: int) -> SiteFormats:
    """Return the format of every linear: int4 or q3h for all, or formats by part.

    Args:
        quantization, group: the options.
    Raises:
        UnsupportedFormat: an unknown or missing part, format or group, with the choices, or a group that does not
            divide a linear's inputs.
    """
    spec = checkpoint.spec
    sites = [site.name for site in spec.sites_of(0)]
    if names_parts(quantization):
        by_site = parse_parts(quantization, dict.fromkeys(LEVELS, group))
        if missing := [site for site in sites if site not in by_site]:
            raise UnsupportedFormat(f"--quantization {quantization!r:.200} leaves out {', '.join(missing)}")
    elif quantization in FEW_BITS:
        get_format(quantization, Ops(CPU, "torch"), group)
        by_site = dict.fromkeys(sites, CodeFormat(quantization, group))
    else:
        choices = ", ".join(FEW_BITS)
        raise UnsupportedFormat(
            f"--quantization {quantization!r:.60}: choose from {choices}, or give formats by part: attn=int4,mlp=q3h"
        )
    for site in spec.sites():
        check_group(torch.empty((0, site.in_features)), by_site[site.name].group, "--quantization-group")
    return {site: (by_site[site],) * spec.num_layers for site in sites}


@torch.inference_mode()
def quantize(
    weights: ModelWeights, formats: SiteFormats, texts: Sequence[Sequence[int]], progress: Progress
) -> Quantized:
    """Round every linear of the layers.

    Args:
        weights: floats; see `load_floats`.
        formats: of every linear.
        texts: token ids that the float model reads to collect the inputs of linears; none longer than its context.
    Raises:
        CorruptModel: the model's outputs are not finite.
    """
    codes: dict[str, GroupQuantizedWeight] = {}
    errors: dict[str, list[tuple[float, float]]] = {site.name: [] for site in weights.spec.sites_of(0)}
    progress("reading the text", 0.0)
    for layer, moments in moments_of_layers(weights, texts, Ops(CPU)):
        linears = weights.layers[layer].linears()
        for site, linear, moment in zip(weights.spec.sites_of(layer), linears, moments, strict=True):
            form = formats[site.name][layer]
            for name, weight in parts_of(layer, site, linear.dequantize()):
                nearest = round_to_nearest(weight, form)
                plain = output_error(nearest, weight, moment)
                if form.name not in FEW_BITS:
                    codes[name] = nearest
                    errors[site.name].append((plain, plain))
                    continue
                try:
                    rounded = round_to_outputs(weight, moment, form.group, form.levels)
                except ValueError as error:
                    raise CorruptModel(f"{name}: {error}") from None
                codes[name] = rounded.codes
                errors[site.name].append((rounded.error, plain))
        progress("rounding layers", (layer + 1) / len(weights.layers))
    mean, plain_mean = torch.tensor(list(chain.from_iterable(errors.values()))).mean(dim=0).tolist()
    by_site = {site: sum(error for error, _ in found) / len(found) for site, found in errors.items()}
    return Quantized(codes, formats, by_site, mean, plain_mean)


def round_to_nearest(weight: Tensor, form: CodeFormat) -> GroupQuantizedWeight:
    """Round weight [O, H] to the nearest codes of a format, as a server does at its start."""
    if form.name in FEW_BITS:
        return round_asymmetric(weight, form.group, form.levels)
    return round_symmetric(weight, form.group)


def parts_of(layer: int, site: SiteShape, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a site under their own names."""
    for module, weight in zip(site.modules, torch.split(stacked, list(site.out_features)), strict=True):
        yield f"model.layers.{layer}.{module}.weight", weight
