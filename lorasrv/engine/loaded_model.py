"""Loaded model: the weights of a base and of its draft model."""

import logging
from dataclasses import dataclass

from lorasrv.distributed.model_processes import ModelProcesses
from lorasrv.engine.checked_model import CheckedModel
from lorasrv.engine.draft_model import load_draft_weights
from lorasrv.models.loader import WeightMeter
from lorasrv.models.quantization.served import ServedWeights
from lorasrv.worker.device import DeviceMemory
from lorasrv.worker.weights import ModelWeights, Progress, load_weights, served_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Hold what an engine computes with."""

    # This process's part, with the fingerprint of all parts.
    weights: ModelWeights
    # None without a draft model.
    draft: ModelWeights | None
    # Weight format of the base.
    served: ServedWeights
    # Bytes of all processes.
    nbytes: int
    # Memory of the other processes, now that they have loaded their parts.
    others: tuple[DeviceMemory, ...]

    @classmethod
    def load(cls, model: CheckedModel, processes: ModelProcesses, progress: Progress) -> "LoadedModel":
        """Load this process's part and the draft model, while the other processes load theirs.

        Raises:
            ModelError: a checkpoint cannot be served.
            ConfigError, NotEnoughMemory: another process reports it.
        """
        part = processes.part(model.checkpoint)
        own = load_weights(part, model.fmt, model.dtype, WeightMeter(), progress, model.device)
        bits, error = own.bits_per_weight, served_error(part, own)
        others = processes.wait_loaded(progress)
        weights = others.join(own)
        packing = model.checkpoint.packing
        served = ServedWeights(model.fmt.name, packing, weights.kept_codes, weights.remade_codes, bits, error)
        if line := served.line():
            logger.log(logging.INFO if served.is_exact else logging.WARNING, "%s", line)
        draft = None
        if model.draft is not None:
            draft = load_draft_weights(model.draft, model.config.model, model.ops, model.device, progress)
        nbytes = weights.nbytes + sum(others.weight_bytes) + (0 if draft is None else draft.nbytes)
        return cls(weights, draft, served, nbytes, others.memory)
