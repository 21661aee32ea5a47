"""One verification, from a job to a verdict: the served computation first, then the oracle over the same tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lorasrv.loaders import open_checkpoint
from lorasrv.verify.errors import CannotVerify
from lorasrv.verify.figures import EffectComparison, LogitComparison, linear_errors
from lorasrv.verify.job import VerifyJob
from lorasrv.verify.oracle import Oracle
from lorasrv.verify.served import Served
from lorasrv.verify.verdict import LINEAR_LIMITS, Figures, Verdict, judge

Progress = Callable[[str, float], None]
ROWS = 4
"""Random inputs of each linear."""


@dataclass(frozen=True)
class Verified:
    """A verdict, and with what it was computed."""

    verdict: Verdict
    quantization: str
    kernels: str


def verify(job: VerifyJob, progress: Progress) -> Verified:
    """Compute and compare.

    Raises:
        CannotVerify: the oracle cannot be built, or there is nothing to compare.
        AdapterError, ModelError: the adapter or the base is not what it was.
    """
    model = job.model
    checkpoint = open_checkpoint(model.model, model.load_format, model.quantized_weights)
    try:
        served = Served(job, checkpoint, lambda _, done: progress("loading the base as served", done))
        answers = []
        for i, prompt in enumerate(job.prompts):
            progress("computing as served", i / len(job.prompts))
            answers.append(served.logits(prompt, job.new_tokens))
        progress("computing as served", 1.0)
        oracle = Oracle(job, checkpoint, served.weights, served.adapter, progress)
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
    try:
        with_adapter, without = adapted.errors(), plain.errors()
    except ValueError:
        raise CannotVerify("the logits are infinite or no numbers: the adapter overflows on these prompts") from None
    linears = linear_errors(_deltas(served, oracle, progress), LINEAR_LIMITS[model.dtype])
    figures = Figures(model.dtype, with_adapter, without, effect.effect(), linears)
    return Verified(judge(figures), served.quantization, served.ops.name)


def _deltas(served: Served, oracle: Oracle, progress: Progress) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every linear of the base, whether or not it is adapted: (name, served delta, PEFT's delta)."""
    spec = served.weights.spec
    random = torch.Generator().manual_seed(0)
    for layer in range(spec.num_layers):
        progress("comparing linears", layer / spec.num_layers)
        for place, site in enumerate(spec.sites()):
            x = torch.randn(ROWS, site.in_features, generator=random)
            slices = torch.split(served.delta(layer, place, x), list(site.out_features), dim=1)
            for module, width, delta in zip(site.modules, site.out_features, slices, strict=True):
                yield f"layers.{layer}.{module}", delta, oracle.delta(layer, module, x, width)
    progress("comparing linears", 1.0)
