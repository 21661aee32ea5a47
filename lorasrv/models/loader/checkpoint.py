"""Define the interface of loaders: named weights one at a time, and a count of the weight bytes in memory.

`state_dict_fp32` makes a whole fp32 state dict for trainers and test oracles; serving never does.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.families import tensor_shapes
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import TokenizerSource

if TYPE_CHECKING:
    from torch import Tensor

    from sgmv_kernels.formats.group_quant import GroupQuantizedWeight


@dataclass(frozen=True, slots=True)
class StoredPacking:
    """Describe the quantization of a checkpoint's file."""

    # The name in its configuration: gptq, awq, compressed-tensors, bitsandbytes or fp8; "mixed" if `lorasrv quantize`
    # wrote it in several formats.
    method: str
    # Distinct bit widths of its linears, ascending.
    bits: tuple[float, ...]
    # Mean bits per weight of the layers' linears as codes, without scales.
    mean_bits: float
    # How the codes differ from the file's weights; "" if they do not.
    rounding: str = ""


class Checkpoint(Protocol):
    """Read an open checkpoint. Tensor names and row orders are Hugging Face's, whatever the file uses."""

    @property
    def name(self) -> str:
        """Return the default served name: the built-in name, or the stem of the file or directory."""
        ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def packing(self) -> StoredPacking | None:
        """Return how the checkpoint was quantized, by a library for transformers or by `lorasrv quantize`.

        None for floats, GGUF files, and codes of one format.
        """
        ...

    def names(self) -> Iterable[str]:
        """Return the canonical names of the tensors that `spec` requires; all exist, with the right shapes."""
        ...

    def tensor(self, name: str) -> "Tensor":
        """Read one tensor into new memory: as stored (fp32, fp16, bf16), or dequantized to fp32.

        Raises:
            CorruptModel: the stored bytes cannot be read.
        """
        ...

    def codes(self, name: str) -> "GroupQuantizedWeight | None":
        """Read one tensor as the integer codes that the file holds.

        Returns: codes [O, H], or None if the file holds floats, or codes of a kind that no format keeps.
        Raises:
            CorruptModel: the stored bytes cannot be read.
        """
        ...

    def tokenizer_source(self) -> TokenizerSource:
        """Return the description of the tokenizer.

        Raises:
            UnsupportedModel, CorruptModel: the checkpoint has no tokenizer that can be built.
        """
        ...

    def close(self) -> None: ...


class WeightMeter:
    """Count the bytes of weights in memory while a model is built, so that tests can check for full fp32 copies."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were allocated."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, nbytes: int) -> None:
        """Count bytes that were freed."""
        self.live_bytes -= nbytes


def check_finite(what: str, floats: "Tensor") -> None:
    """Check that floats are finite.

    Raises:
        CorruptModel: one is NaN or infinite; the message begins with `what`.
    """
    # An infinity is the minimum or the maximum, and NaN becomes both. `isfinite` takes thirty times as long.
    if not all(math.isfinite(float(end)) for end in floats.aminmax()):
        raise CorruptModel(
            f"{what} holds NaN or infinity: the file is damaged, or was saved after training had diverged; "
            "take another copy of the model"
        )


def check_num_layers(spec: ModelSpec, num_tensors: int) -> None:
    """Check the number of layers before allocating for each: a damaged count of 2^31 would exhaust memory.

    Raises:
        CorruptModel: the checkpoint has fewer tensors than layers.
    """
    if spec.num_layers > num_tensors:
        raise CorruptModel(f"the checkpoint claims {spec.num_layers} layers, but has {num_tensors} tensors")


def check_shapes(spec: ModelSpec, found: dict[str, tuple[int, ...]]) -> None:
    """Check that every tensor of the spec exists with its shape.

    Raises:
        CorruptModel: some are missing or have another shape; the message names the first few.
    """
    wanted = tensor_shapes(spec)
    missing = [spec.names.in_file(name) for name in wanted if name not in found]
    if missing:
        raise CorruptModel(f"{len(missing)} of {len(wanted)} tensors are missing: {_few(missing)}")
    wrong = [
        f"{spec.names.in_file(name)} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if found[name] != shape
    ]
    if wrong:
        raise CorruptModel(f"{len(wrong)} tensors have a wrong shape: {_few(wrong)}")


def check_none_left(spec: ModelSpec, left: Collection[str]) -> None:
    """Check that no tensor of a file is left unread, because a missing bias or norm would change the answers.

    Raises:
        UnsupportedModel: some are unread; the message names the first few.
    """
    if left:
        raise UnsupportedModel(
            f"the file has tensors that no {spec.family} model of {spec.num_layers} layers reads here: "
            f"{_few([f'{name:.80}' for name in sorted(left)])}; serve the model from its Hugging Face directory"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def state_dict_fp32(checkpoint: Checkpoint) -> "dict[str, Tensor]":
    """Return every weight under Hugging Face's name, fp32, for `load_state_dict`.

    A tied head appears under both names. Norms of a gemma GGUF file are as stored: they include the 1 that Hugging
    Face's modules add.
    """
    state = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state
