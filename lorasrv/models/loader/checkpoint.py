"""What every loader gives: named weights one at a time, and how many bytes of them are alive.

The whole checkpoint as an fp32 state dict, for trainers and oracles; the serving path never holds one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from lorasrv.errors import CorruptModel
from lorasrv.models.families import tensor_shapes
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import TokenizerSource

if TYPE_CHECKING:
    from torch import Tensor

    from sgmv_kernels.ops import GroupQuantizedWeight


class Checkpoint(Protocol):
    """An open checkpoint. Names and row orders are Hugging Face's, whatever the file has."""

    @property
    def name(self) -> str:
        """Default served name: the built-in name, or the file's or directory's stem."""
        ...

    @property
    def spec(self) -> ModelSpec: ...

    def names(self) -> Iterable[str]:
        """Canonical names of the tensors that `spec` calls for; all are present, with the right shapes."""
        ...

    def tensor(self, name: str) -> "Tensor":
        """One tensor, newly allocated: as stored (fp32, fp16, bf16), or dequantized to fp32. Raises CorruptModel."""
        ...

    def codes(self, name: str) -> "GroupQuantizedWeight | None":
        """One tensor as the codes that the file holds; None where it holds floats, or codes that we do not keep."""
        ...

    def tokenizer_source(self) -> TokenizerSource:
        """Raises UnsupportedModel or CorruptModel where the checkpoint holds no tokenizer that we can build."""
        ...

    def close(self) -> None: ...


class WeightMeter:
    """Counts live weight bytes while a model is built, so that "never a full fp32 copy" can be tested."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


def check_num_layers(spec: ModelSpec, num_tensors: int) -> None:
    """Before anything is made for each layer: a damaged count of 2^31 layers would take all memory.

    Raises CorruptModel."""
    if spec.num_layers > num_tensors:
        raise CorruptModel(f"the checkpoint claims {spec.num_layers} layers, but has {num_tensors} tensors")


def check_shapes(spec: ModelSpec, found: dict[str, tuple[int, ...]]) -> None:
    """Every tensor of the spec is there and has its shape. Raises CorruptModel with the first few that do not."""
    wanted = tensor_shapes(spec)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CorruptModel(f"{len(missing)} of {len(wanted)} tensors are missing: {_few(missing)}")
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}" for name, shape in wanted.items() if found[name] != shape
    ]
    if wrong:
        raise CorruptModel(f"{len(wrong)} tensors have a wrong shape: {_few(wrong)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def state_dict_fp32(checkpoint: Checkpoint) -> "dict[str, Tensor]":
    """Every weight under Hugging Face's name, as `load_state_dict` takes it; a tied head is there under both names.

    A GGUF file of gemma gives its norms as it has them, with the 1 that Hugging Face's modules add.
    """
    state = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state
