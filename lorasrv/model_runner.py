"""A planned step -> sampled tokens. Owns the model and the pool's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lorasrv.adapter_loader import WriteAdapter
from lorasrv.batch import build_batch
from lorasrv.device_memory import DeviceMemory
from lorasrv.models.decoder import Decoder, DecoderLimits
from lorasrv.models.weights import ModelWeights
from lorasrv.request import RequestId
from lorasrv.sampler import sample
from lorasrv.step import PageOp, SchedulerOutput
from sgmv_kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The token of every request whose tokens are all computed; a request whose logits are no numbers has none."""

    sampled: Mapping[RequestId, int]


class ModelRunner:
    """Runs steps on one device."""

    def __init__(
        self,
        weights: ModelWeights,
        memory: DeviceMemory,
        limits: DecoderLimits,
        ops: Ops,
    ) -> None:
        self._memory = memory
        self._adapter_dtype = limits.adapter_dtype
        self._ops = ops
        self._decoder = Decoder(weights, memory, limits, ops)

    @property
    def write_adapter(self) -> WriteAdapter:
        """How loaders fill an adapter's pages, in a thread of theirs."""
        return self._memory.write_adapter

    def arrange(self, ops: Sequence[PageOp]) -> int:
        """Move, copy and swap pages as the step wants them; returns how many bytes went to or came from host memory."""
        return self._memory.apply(ops)

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step whose pages are arranged."""
        if not step.scheduled:
            return ModelRunnerOutput({})
        batch = build_batch(step, self._memory, self._adapter_dtype, self._ops)
        logits = self._decoder.forward(batch)
        # The weights of one adapter may overflow; its requests fail, the step's others do not.
        finite = torch.isfinite(logits.sum(dim=-1))
        good = [s for s, is_finite in zip(batch.sampled, finite.tolist(), strict=True) if is_finite]
        if len(good) < len(batch.sampled):
            logits = logits[finite]
        tokens = sample(logits, [s.sampling for s in good], [s.num_generated for s in good])
        return ModelRunnerOutput(dict(zip((s.request_id for s in good), tokens, strict=True)))
