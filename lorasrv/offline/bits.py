"""Choose the format of each linear so that a model of a given size changes least.

A format causes a relative error e in a linear's outputs. The effect on the model is measured: one kind of site in one
third of the layers is rounded at a time, and the divergence of the next tokens' probabilities, divided by the errors,
gives the sensitivity s of these linears. The chosen formats minimize the sum of s e within a number of bytes.

Source: bits are allotted by a Lagrange multiplier (Shoham and Gersho 1988), assuming that divergences add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.code_format import CODE_BITS, GROUPS, CodeFormat
from lorasrv.models.loader.quantized import SiteFormats
from lorasrv.models.quantization import Linear
from lorasrv.models.quantization.gptq import output_error
from lorasrv.models.quantization.rounding import check_group
from lorasrv.models.spec import ModelSpec, SiteShape
from lorasrv.offline.quantize import CPU, Progress, moments_of_layers, parts_of, passes, round_to_nearest, with_linears
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.ops import Ops

MEASURED_TEXTS = 8
"""Number of texts for measuring sensitivities; the logits of all their tokens are kept."""
SCALE_BITS = 0.5
"""Additional bits per code for scales and minima, with groups of 64."""
MAX_BITS = 8.0
_GROUPS, _SMALL_GROUP = (64, 128), 32
_THIRDS = 3
_HALVINGS = 100
Place = tuple[int, str]
"""A linear: its layer and its site's name."""


@dataclass(frozen=True, slots=True)
class Option:
    """Hold the costs of a format of one linear."""

    format: CodeFormat
    # Size of weights, scales and minima, in bits.
    size: float
    # Expected contribution to the model's divergence, in nats per token.
    harm: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """Hold the formats of all linears, with the expected divergence of each site, in nats per token."""

    formats: SiteFormats
    harms: Mapping[str, float]


def candidates(site: SiteShape) -> list[CodeFormat]:
    """Return the formats that a linear may get: in groups of 64 and 128, or of 32 if 64 does not divide its inputs.

    Raises:
        UnsupportedFormat: no group divides the inputs.
    """
    groups = [group for group in _GROUPS if site.in_features % group == 0]
    if not groups:
        check_group(torch.empty((0, site.in_features)), _SMALL_GROUP, "--bits")
        groups = [_SMALL_GROUP]
    return [CodeFormat(name, group) for name in GROUPS for group in groups if group in GROUPS[name]]


def check_bits(spec: ModelSpec, bits: float) -> None:
    """Check that formats with so many bits exist.

    Args:
        bits: mean bits of a code; `SCALE_BITS` are added.
    Raises:
        UnsupportedFormat: the value is out of range (the message names both), or no group divides a linear's inputs.
    """
    sites = [site for layer in range(spec.num_layers) for site in spec.sites_of(layer)]
    fewest = sum(min(form.bits for form in candidates(site)) * site.size for site in sites)
    least = max(min(CODE_BITS.values()), fewest / spec.linear_weights - SCALE_BITS)
    if not least <= bits <= MAX_BITS:
        raise UnsupportedFormat(f"--bits {bits:g}: choose from {least:g} to {MAX_BITS:g} for this model")


@torch.inference_mode()
def choose_formats(weights: ModelWeights, bits: float, texts: Sequence[Sequence[int]], progress: Progress) -> Chosen:
    """Choose a format for every linear of the layers.

    Args:
        weights: floats.
        bits: mean bits of a code; with `SCALE_BITS` for scales they give the largest size in bytes.
        texts: token ids; the first `MEASURED_TEXTS` texts are read, some fifteen times.
    Raises:
        UnsupportedFormat: see `check_bits`.
    """
    spec, ops, some = weights.spec, Ops(CPU), texts[:MEASURED_TEXTS]
    check_bits(spec, bits)
    errors = _errors(weights, some, ops, progress)
    sensitivities = _sensitivities(weights, errors, some, ops, progress)
    sizes = {(layer, site.name): site.size for layer in range(spec.num_layers) for site in spec.sites_of(layer)}
    options = {
        place: [Option(form, form.bits * sizes[place], sensitivities[place] * error) for form, error in found.items()]
        for place, found in errors.items()
    }
    chosen = dict(zip(options, allot(list(options.values()), (bits + SCALE_BITS) * spec.linear_weights), strict=True))
    names, layers = [site.name for site in spec.sites_of(0)], range(spec.num_layers)
    return Chosen(
        {site: tuple(chosen[layer, site].format for layer in layers) for site in names},
        {site: sum(chosen[layer, site].harm for layer in layers) for site in names},
    )


def allot(options: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Choose one option each, with the least total harm that is found within the budget of sizes.

    Bisection finds the multiplier; the rest of the budget goes to single options, those that save the most harm per
    size first. The smallest options must fit.
    """

    def cheapest(price: float) -> list[Option]:
        return [min(each, key=lambda option: (option.harm + price * option.size, option.size)) for each in options]

    low, high = 0.0, 1.0 + max(_gain(a, b) for each in options for a in each for b in each)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = sum(option.size for option in cheapest(middle)) <= budget
        low, high = (low, middle) if fits else (middle, high)
    chosen = cheapest(high)
    while better := _best_step(options, chosen, budget - sum(option.size for option in chosen)):
        place, option = better
        chosen[place] = option
    return chosen


def _gain(now: Option, larger: Option) -> float:
    """Return the harm that a larger option saves per size; 0 if it is not larger."""
    return (now.harm - larger.harm) / (larger.size - now.size) if larger.size > now.size else 0.0


def _best_step(options: Sequence[Sequence[Option]], chosen: Sequence[Option], left: float) -> tuple[int, Option] | None:
    """Return the larger option with the greatest gain per size among those that fit; None if none does."""
    steps = [
        (_gain(now, option), -place, option)
        for place, (each, now) in enumerate(zip(options, chosen, strict=True))
        for option in each
        if 0 < option.size - now.size <= left and option.harm < now.harm
    ]
    if not steps:
        return None
    _, place, option = max(steps, key=lambda step: step[:2])
    return -place, option


def _errors(
    weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops, progress: Progress
) -> dict[Place, dict[CodeFormat, float]]:
    """Return the mean relative change of the outputs of each linear's parts, for each format that it may get."""
    errors: dict[Place, dict[CodeFormat, float]] = {}
    for layer, moments in moments_of_layers(weights, texts, ops):
        linears = weights.layers[layer].linears()
        for site, linear, moment in zip(weights.spec.sites_of(layer), linears, moments, strict=True):
            parts = [weight for _, weight in parts_of(layer, site, linear.dequantize())]
            errors[layer, site.name] = {
                form: sum(output_error(round_to_nearest(part, form), part, moment) for part in parts) / len(parts)
                for form in candidates(site)
            }
        progress("rounding in every format", (layer + 1) / len(weights.layers))
    return errors


def _sensitivities(
    weights: ModelWeights,
    errors: Mapping[Place, Mapping[CodeFormat, float]],
    texts: Sequence[Sequence[int]],
    ops: Ops,
    progress: Progress,
) -> dict[Place, float]:
    """Return the divergence in nats per token for each unit of a linear's error."""
    count, sites = weights.spec.num_layers, weights.spec.sites_of(0)
    exact = [logits.clone() for logits in passes(weights, texts, ops, wants_logits=True)]
    thirds = [range(count * i // _THIRDS, count * (i + 1) // _THIRDS) for i in range(_THIRDS)]
    groups = [(layers, index, site) for layers in thirds if layers for index, site in enumerate(sites)]
    found: dict[Place, float] = {}
    for done, (layers, index, site) in enumerate(groups):
        probe = next(form for form in candidates(site) if form.name == "int4")
        rounded = _with_rounded(weights, layers, index, probe)
        divergence = _divergence(exact, passes(rounded, texts, ops, wants_logits=True))
        error = sum(errors[layer, site.name][probe] for layer in layers)
        found |= {(layer, site.name): divergence / error if error else 0.0 for layer in layers}
        progress("measuring what rounding does to the model", (done + 1) / len(groups))
    return found


class _Changed:
    """Wrap a `Linear` and add up the change of its outputs that rounding its weights causes."""

    can_be_recorded = False

    def __init__(self, linear: Linear, change: Tensor) -> None:
        self._linear, self._change = linear, change
        self.in_features, self.out_features, self.nbytes = linear.in_features, linear.out_features, linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x) + x @ self._change.T

    def dequantize(self) -> Tensor:
        return self._linear.dequantize() + self._change

    def rows(self, ids: Tensor) -> Tensor:
        return self._linear.rows(ids) + self._change[ids]


def _with_rounded(weights: ModelWeights, layers: range, index: int, form: CodeFormat) -> ModelWeights:
    """Return the model with one site of some layers rounded; `index` is its place in `ModelSpec.sites_of`."""
    changed = list(weights.layers)
    for layer in layers:
        linears = list(changed[layer].linears())
        exact = linears[index].dequantize()
        change = round_to_nearest(exact, form).dequantize() - exact
        linears[index] = _Changed(linears[index], change)
        changed[layer] = with_linears(changed[layer], linears)
    return replace(weights, layers=tuple(changed))


def _divergence(exact: Sequence[Tensor], found: Iterable[Tensor]) -> float:
    """Return the mean divergence of next tokens' probabilities from those of `exact`, in nats."""
    total, rows = 0.0, 0
    for logits, other in zip(exact, found, strict=True):
        wanted = logits.log_softmax(dim=-1)
        total += float((wanted.exp() * (wanted - other.log_softmax(dim=-1))).sum())
        rows += len(logits)
    return max(0.0, total / rows)
