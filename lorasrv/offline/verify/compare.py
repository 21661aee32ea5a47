"""Run one verification from job to verdict: the served computation first, then the reference over the same tokens."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import HEAD
from lorasrv.offline.verify.job import CannotVerify, VerifyJob
from lorasrv.offline.verify.peft_reference import PeftReference
from lorasrv.offline.verify.served import ServedModel
from lorasrv.offline.verify.verdict import (
    EXACT,
    LINEAR_LIMITS,
    ROW_ROUNDING,
    ComparisonStats,
    Effect,
    LinearErrors,
    LogitErrors,
    Verdict,
    judge,
)

MAX_NAMED = 8
FLOAT_ROUNDING = 1e-6
"""Largest float32 error of the difference of two outputs of a linear, as a share of the output."""


@dataclass
class _Sums:
    values: int = 0
    absolute: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    def add(self, difference: Tensor) -> None:
        exact = difference.double().abs()
        self.values += exact.numel()
        self.absolute += float(exact.sum())
        self.squares += float(exact.square().sum())
        # Not max(), which would drop a NaN.
        top = float(exact.max())
        self.largest = top if math.isnan(top) or top > self.largest else self.largest

    @property
    def mean(self) -> float:
        return self.absolute / max(1, self.values)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(1, self.values))


@dataclass
class LogitComparison:
    """Accumulate differences between served and reference logits, prompt by prompt."""

    _sums: _Sums = field(default_factory=_Sums)
    _positions: int = 0
    _equal: int = 0
    _relative: float = 0.0
    _gap: float = 0.0
    _variances: float = 0.0

    def add(self, served: Tensor, oracle: Tensor) -> None:
        """Compare logits, both [positions, V] fp32."""
        difference = served - oracle
        self._sums.add(difference)
        scale = oracle.abs().amax(dim=1).clamp_min(1e-30)
        self._relative = max(self._relative, float((difference.abs().amax(dim=1) / scale).max()))
        ours, theirs = served.argmax(dim=1), oracle.argmax(dim=1)
        gaps = oracle.amax(dim=1) - oracle.gather(1, ours[:, None])[:, 0]
        self._positions += len(served)
        self._variances += float(oracle.double().var(dim=1, correction=0).sum())
        self._equal += int((ours == theirs).sum())
        self._gap = max(self._gap, float(gaps.max()))

    def errors(self) -> LogitErrors:
        """Summarise the differences.

        Raises:
            ValueError: logits are not finite.
        """
        if not math.isfinite(self._sums.squares):
            raise ValueError("logits are not finite")
        return LogitErrors(
            positions=self._positions,
            max_abs=self._sums.largest,
            mean_abs=self._sums.mean,
            rms=self._sums.rms,
            spread=math.sqrt(self._variances / max(1, self._positions)),
            max_relative=self._relative,
            greedy_equal=self._equal,
            largest_gap=self._gap,
        )


@dataclass
class EffectComparison:
    """Accumulate differences between the reference's logits with the adapter and without."""

    _sums: _Sums = field(default_factory=_Sums)
    _changed: int = 0

    def add(self, adapted: Tensor, plain: Tensor) -> None:
        """Compare logits, both [positions, V] fp32."""
        self._sums.add(adapted - plain)
        self._changed += int((adapted.argmax(dim=1) != plain.argmax(dim=1)).sum())

    def effect(self) -> Effect:
        return Effect(self._sums.largest, self._sums.mean, self._sums.rms, self._changed)


class ModuleDeltas(NamedTuple):
    """Hold an adapter's change of one module's output for the same inputs, as served and with PEFT."""

    name: str
    served: Tensor
    oracle: Tensor
    # Largest norm of their difference that rounding may cause.
    rounding: float = 0.0


def linear_errors(compared: Iterable[ModuleDeltas], limit: float) -> LinearErrors:
    """Compare the deltas of every linear of the base.

    The error of an adapter missing on one side is 1, of one with twice the strength 0.5.
    """
    errors: dict[str, float] = {}
    adapted = 0
    for name, served, oracle, rounding in compared:
        larger = max(float(served.double().norm()), float(oracle.double().norm()))
        off = float((served.double() - oracle.double()).norm())
        # NaN and infinities count as the largest error.
        finite = math.isfinite(off) and math.isfinite(larger)
        errors[name] = 0.0 if larger == 0 else max(0.0, off - rounding) / larger if finite else 2.0
        adapted += bool(oracle.any())
    wrong = sorted((name for name, error in errors.items() if error > limit), key=lambda name: -errors[name])
    worst = max(errors, key=errors.__getitem__)
    return LinearErrors(len(errors), adapted, errors[worst], worst, tuple(wrong[:MAX_NAMED]), len(wrong))


Progress = Callable[[str, float], None]
ROWS = 4
"""Random inputs per linear."""
HEAD_ROWS = 16
"""Random inputs of the head, whose own rows may be few."""
TOKENS = 256
"""Random tokens of the embedding, and as many tokens with own rows of the adapter."""


@dataclass(frozen=True)
class Verified:
    """Hold a verdict and the configuration it was computed with."""

    verdict: Verdict
    quantization: str
    kernels: str


def verify(job: VerifyJob, progress: Progress) -> Verified:
    """Compute with both implementations and compare.

    Raises:
        CannotVerify: the reference cannot be built, or the results cannot be compared.
        AdapterError, ModelError: the adapter or the base has changed or is damaged.
    """
    model = job.model
    checkpoint = open_checkpoint(model.model, model.load_format, model.quantized_weights)
    try:
        served = ServedModel(job, checkpoint, lambda _, done: progress("loading the base as served", done))
        answers = []
        for i, prompt in enumerate(job.prompts):
            progress("computing as served", i / len(job.prompts))
            answers.append(served.logits(prompt, job.new_tokens))
        progress("computing as served", 1.0)
        oracle = PeftReference(job, checkpoint, served.weights, served.adapter, progress)
    finally:
        checkpoint.close()
    adapted, plain, effect = LogitComparison(), LogitComparison(), EffectComparison()
    for i, answer in enumerate(answers):
        progress("computing with PEFT", i / len(answers))
        theirs, base = oracle.logits(answer.tokens, len(answer.adapted), answer.active_from)
        adapted.add(answer.adapted, theirs)
        plain.add(answer.plain, base)
        effect.add(theirs, base)
    progress("computing with PEFT", 1.0)
    without, with_adapter = _errors(plain, "the base"), _errors(adapted, "the adapter")
    linears = linear_errors(_deltas(served, oracle, model.dtype, progress), LINEAR_LIMITS[model.dtype])
    figures = ComparisonStats(model.dtype, with_adapter, without, effect.effect(), linears)
    return Verified(judge(figures), served.quantization, served.ops.name)


def _errors(compared: LogitComparison, what: str) -> LogitErrors:
    try:
        return compared.errors()
    except ValueError:
        raise CannotVerify(f"the logits are infinite or NaN: {what} overflows on these prompts") from None


def _deltas(served: ServedModel, oracle: PeftReference, dtype: str, progress: Progress) -> Iterator[ModuleDeltas]:
    """Yield the deltas of every linear of the layers, adapted or not, and of the head and the embedding if the adapter
    changes them.
    """
    spec = served.weights.spec
    random = torch.Generator().manual_seed(0)
    for layer in range(spec.num_layers):
        progress("comparing linears", layer / spec.num_layers)
        for place, site in zip(spec.site_indices(layer), spec.sites_of(layer), strict=True):
            x = torch.randn(ROWS, site.in_features, generator=random)
            parts = (torch.split(part, list(site.out_features), dim=1) for part in served.delta(layer, place, x))
            for module, delta, plain in zip(site.modules, *parts, strict=True):
                theirs, output = oracle.delta(layer, module, x)
                yield ModuleDeltas(
                    f"layers.{layer}.{module}", delta, theirs, FLOAT_ROUNDING * max(output, float(plain.norm()))
                )
    yield from _end_deltas(served, oracle, dtype, random)
    progress("comparing linears", 1.0)


def _end_deltas(
    served: ServedModel, oracle: PeftReference, dtype: str, random: torch.Generator
) -> Iterator[ModuleDeltas]:
    """Yield the deltas of the head and of the embedding, whichever the adapter changes."""
    spec, adapter = served.weights.spec, served.adapter.spec
    with_rows = {own.module for own in adapter.rows}
    changed = with_rows | {own.module for own in adapter.modules if own.layer == spec.num_layers}
    if HEAD in changed:
        states = torch.randn(HEAD_ROWS, spec.hidden_size, generator=random)
        share = ROW_ROUNDING[dtype] if HEAD in with_rows else EXACT
        yield _end_delta(HEAD, served.head(states), oracle.end(HEAD, states), share)
    if (name := spec.names.embedding) in changed:
        parts = torch.arange(spec.vocab_size), torch.from_numpy(served.own_tokens[1])
        ids = torch.cat([own[torch.randperm(len(own), generator=random)[:TOKENS]] for own in parts])
        share = ROW_ROUNDING[dtype] if name in with_rows else EXACT
        yield _end_delta(name, served.embedding(ids.tolist()), oracle.end(name, ids), share)


def _end_delta(name: str, served: tuple[Tensor, Tensor], oracle: tuple[Tensor, Tensor], share: float) -> ModuleDeltas:
    """Compare pairs of outputs with the adapter and without; rounding may change them by `share`."""
    rounding = share * float(oracle[0].double().norm())
    return ModuleDeltas(name, served[0] - served[1], oracle[0] - oracle[1], rounding)
