"""Draft model: open and load a second base that drafts for the served one."""

import torch

from lorasrv.config import EngineConfig, ModelOptions
from lorasrv.errors import ConfigError, ModelError
from lorasrv.models.loader import Checkpoint, WeightMeter, open_checkpoint
from lorasrv.models.quantization import StoredWeights, get_format, select_format
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.weights import ModelWeights, Progress, load_weights
from sgmv_kernels.ops import Ops


def open_draft_model(
    config: EngineConfig, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> Checkpoint | None:
    """Open the draft model that the options name; None if they name none.

    Raises:
        ConfigError: it cannot be read, its tokens differ from those of the served base, or its context is shorter than
            a request's.
    """
    model = config.speculation.draft_model
    if model is None:
        return None
    try:
        checkpoint = open_checkpoint(model)
    except ModelError as error:
        raise ConfigError(f"--draft-model: {error}") from error
    try:
        _check(checkpoint, model, tokenizer, vocab_size, max_model_len)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _check(checkpoint: Checkpoint, model: str, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
    if not Tokenizer.from_source(checkpoint.tokenizer_source()).has_ids_of(tokenizer):
        raise ConfigError(f"--draft-model {model} has other token ids than --model; take a base of the same vocabulary")
    if checkpoint.spec.vocab_size != vocab_size:
        raise ConfigError(
            f"--draft-model {model} has {checkpoint.spec.vocab_size} tokens, --model {vocab_size}: take one of as many"
        )
    if checkpoint.spec.max_position < max_model_len:
        raise ConfigError(
            f"--draft-model {model} has a context of {checkpoint.spec.max_position} tokens, requests may have "
            f"{max_model_len}; lower --max-model-len"
        )


def load_draft_weights(
    checkpoint: Checkpoint, options: ModelOptions, ops: Ops, device: torch.device, progress: Progress
) -> ModelWeights:
    """Load a draft model in the format that fits it.

    Raises:
        ModelError: the checkpoint cannot be served.
    """
    name, accepted = select_format(StoredWeights.of(checkpoint), "auto", None)
    fmt = get_format(name, ops, accepted.group, keep_int8_codes=accepted.keep_int8_codes)
    return load_weights(checkpoint, fmt, getattr(torch, options.dtype), WeightMeter(), progress, device)
