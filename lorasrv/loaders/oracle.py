"""The whole checkpoint as an fp32 state dict, for trainers and oracles; the serving path never holds one."""

from typing import TYPE_CHECKING

from lorasrv.loaders.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


def state_dict_fp32(checkpoint: Checkpoint) -> "dict[str, Tensor]":
    """Every weight under Hugging Face's name, as `load_state_dict` takes it; a tied head is there under both names.

    A GGUF file of gemma gives its norms as it has them, with the 1 that Hugging Face's modules add.
    """
    state = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state
