"""Run one verification from job to verdict: the served computation first, then the reference over the same tokens."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorasrv.models.loader import open_checkpoint
from lorasrv.offline.verify.job import CannotVerify, VerifyJob
from lorasrv.offline.verify.peft_reference import PeftReference
from lorasrv.offline.verify.served import ServedModel
from lorasrv.offline.verify.verdict import (
    LINEAR_LIMITS,
    ComparisonStats,
    Effect,
    LinearErrors,
    LogitErrors,
    Verdict,
    judge,
)

MAX_NAMED = 8


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


def linear_errors(compared: Iterable[tuple[str, Tensor, Tensor]], limit: float) -> LinearErrors:
    """Compare (name, served delta, PEFT's delta) of every linear of the base.

    The error of an adapter missing on one side is 1, of one with twice the strength 0.5.
    """
    errors: dict[str, float] = {}
    adapted = 0
    for name, served, oracle in compared:
        larger = max(float(served.double().norm()), float(oracle.double().norm()))
        off = float((served.double() - oracle.double()).norm())
        # NaN and infinities count as the largest error.
        errors[name] = 0.0 if larger == 0 else off / larger if math.isfinite(off / larger) else 2.0
        adapted += bool(oracle.any())
    wrong = sorted((name for name, error in errors.items() if error > limit), key=lambda name: -errors[name])
    worst = max(errors, key=errors.__getitem__)
    return LinearErrors(len(errors), adapted, errors[worst], worst, tuple(wrong[:MAX_NAMED]), len(wrong))


Progress = Callable[[str, float], None]
ROWS = 4
"""Random inputs per linear."""


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
        theirs, base = oracle.logits(answer.tokens, len(answer.adapted))
        adapted.add(answer.adapted, theirs)
        plain.add(answer.plain, base)
        effect.add(theirs, base)
    progress("computing with PEFT", 1.0)
    without, with_adapter = _errors(plain, "the base"), _errors(adapted, "the adapter")
    linears = linear_errors(_deltas(served, oracle, progress), LINEAR_LIMITS[model.dtype])
    figures = ComparisonStats(model.dtype, with_adapter, without, effect.effect(), linears)
    return Verified(judge(figures), served.quantization, served.ops.name)


def _errors(compared: LogitComparison, what: str) -> LogitErrors:
    try:
        return compared.errors()
    except ValueError:
        raise CannotVerify(f"the logits are infinite or NaN: {what} overflows on these prompts") from None


def _deltas(served: ServedModel, oracle: PeftReference, progress: Progress) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, served delta, PEFT's delta) for every linear of the base, adapted or not."""
    spec = served.weights.spec
    random = torch.Generator().manual_seed(0)
    for layer in range(spec.num_layers):
        progress("comparing linears", layer / spec.num_layers)
        for place, site in zip(spec.site_indices(layer), spec.sites_of(layer), strict=True):
            x = torch.randn(ROWS, site.in_features, generator=random)
            slices = torch.split(served.delta(layer, place, x), list(site.out_features), dim=1)
            for module, width, delta in zip(site.modules, site.out_features, slices, strict=True):
                yield f"layers.{layer}.{module}", delta, oracle.delta(layer, module, x, width)
    progress("comparing linears", 1.0)
