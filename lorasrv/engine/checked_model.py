"""Checked model: what a checkpoint and the options determine before the weights are loaded, which takes long."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from adapter_store.formats.weights import HeadArrays
from lorasrv.config import EngineConfig, ModelOptions
from lorasrv.engine.draft_model import open_draft_model
from lorasrv.engine.memory_plan import MemoryPlan
from lorasrv.errors import ConfigError
from lorasrv.models.loader import Checkpoint
from lorasrv.models.quantization import QuantFormat
from lorasrv.models.spec import ModelSpec
from lorasrv.speculation.drafters import draft_layers
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource
from lorasrv.worker.base_format import choose_format, make_ops
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import activation_dtype, resolve_device
from lorasrv.worker.draft_heads import read_heads
from lorasrv.worker.weights import Progress
from sgmv_kernels.backend import KernelsUnavailable
from sgmv_kernels.formats.kv_format import KVFormat, get_kv_format
from sgmv_kernels.ops import Ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedModel:
    """Hold what an engine is built from."""

    checkpoint: Checkpoint
    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    kv_format: KVFormat
    max_model_len: int
    ops: Ops
    tokenizer_source: TokenizerSource
    tokenizer: Tokenizer
    # Weight format of the base.
    fmt: QuantFormat
    # Open checkpoint of the draft model; None without one.
    draft: Checkpoint | None
    # Layers of the base that draft tokens, and the base's own Medusa heads.
    draft_layers: tuple[int, ...]
    draft_heads: HeadArrays

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> "CheckedModel":
        """Check all that can be checked before weights are loaded.

        Raises:
            ModelError: the checkpoint cannot be served.
            ConfigError: an option does not fit this model or machine.
        """
        spec = checkpoint.spec
        device = resolve_device(config.model.device)
        dtype = getattr(torch, config.model.dtype)
        kv_format = get_kv_format(config.memory.kv_cache_dtype, config.model.dtype)
        max_model_len = _max_model_len(config.model.max_model_len, spec)
        ops = _make_ops(config.model, spec, device, dtype, kv_format, progress)
        source = checkpoint.tokenizer_source()
        tokenizer = Tokenizer.from_source(source)
        heads = config.speculation.draft_heads
        return cls(
            checkpoint,
            config,
            device,
            dtype,
            kv_format,
            max_model_len,
            ops,
            source,
            tokenizer,
            fmt=choose_format(config.model, checkpoint, ops),
            draft_layers=draft_layers(spec.num_layers, config.speculation.draft_layers, spec.kv_source_layers),
            draft_heads=() if heads is None else read_heads(Path(heads), spec.hidden_size),
            # Opened last: an error above would leave it open.
            draft=open_draft_model(config, tokenizer, spec.vocab_size, max_model_len),
        )

    @property
    def spec(self) -> ModelSpec:
        """Return the base's spec."""
        return self.checkpoint.spec

    @property
    def limits(self) -> DecoderLimits:
        """Return the sizes of the largest step."""
        scheduler = self.config.scheduler
        activation = activation_dtype(self.device, self.dtype)
        return DecoderLimits(
            self.max_model_len, scheduler.max_num_batched_tokens, scheduler.max_num_seqs, self.dtype, activation
        )

    def plan_memory(self) -> MemoryPlan:
        """Plan the memory, and warn of what may grow too large.

        Raises:
            ConfigError: the pool is too small.
            NotEnoughMemory: the server as a whole is too large.
        """
        draft = None if self.draft is None else self.draft.spec
        plan = MemoryPlan.of(self.config, self.spec, self.fmt.name, self.device, self.checkpoint.packing, draft)
        plan.check()
        if warning := plan.warning():
            logger.warning(warning)
        return plan


def _make_ops(
    options: ModelOptions,
    spec: ModelSpec,
    device: torch.device,
    adapter_dtype: torch.dtype,
    kv_format: KVFormat,
    progress: Progress,
) -> Ops:
    try:
        ops = make_ops(options, spec, device)
        ops.warm_up(adapter_dtype, kv_format, progress)
        return ops
    except KernelsUnavailable as error:
        raise ConfigError(f"--kernels: {error}; use --kernels auto or torch") from error


def _max_model_len(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is not None and wanted > spec.max_position:
        why = ": its RoPE is served within the original context only" if spec.rope.max_position else ""
        raise ConfigError(f"--max-model-len {wanted} is more than the {spec.max_position} that the model supports{why}")
    return wanted or spec.max_position
