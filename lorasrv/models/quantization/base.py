"""Define the interface of weight formats. T rows, H inputs, O outputs, V vocabulary; CPU activations are fp32."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from lorasrv.models.loader.checkpoint import Checkpoint, StoredPacking
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.ops import Ops


class Linear(Protocol):
    """Hold a stored [O, H] weight, with its bias if it has one."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Return the bytes of this linear, without those shared with an embedding."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Return whether a call launches kernels of `Ops` and does nothing else."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, H]; returns a new [T, O] in x's dtype."""
        ...

    def dequantize(self) -> Tensor:
        """Return the weights that the arithmetic uses, exactly, [O, H] fp32."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of `dequantize`, ids [N] int64 -> [N, H] fp32."""
        ...


class Embedding(Protocol):
    """Hold a stored [V, H] table."""

    @property
    def nbytes(self) -> int: ...

    @property
    def can_be_recorded(self) -> bool:
        """Return whether a call launches kernels of `Ops` and does nothing else."""
        ...

    def __call__(self, ids: Tensor) -> Tensor:
        """Look up ids [T] int64; returns [T, H] fp32."""
        ...

    def dequantize(self) -> Tensor:
        """Return the table that the lookup uses, exactly, [V, H] fp32."""
        ...


class Fit(IntEnum):
    """Rate a checkpoint for a format, worst first; `--quantization auto` takes the best of all formats."""

    REFUSED = 0
    # Serves it only if selected by name.
    ON_REQUEST = 1
    # Leaves the weights as floats.
    FLOATS = 2
    # Rounds floats, and is the default for them.
    DEFAULT = 3
    # Keeps the codes that the file holds.
    EXACT = 4
    # Made for files of this method: keeps codes of every kind.
    OWN = 5


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Hold a format's rating of a checkpoint, with its reason and settings."""

    fit: Fit
    # Reason for an error message: a refusal names the fix.
    reason: str
    # Inputs that share a scale; None for formats without groups.
    group: int | None = None
    # Whether the file's 8-bit codes of some linears stay unchanged in a format of fewer bits.
    keep_int8_codes: bool = True


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Hold the facts by which formats rate a checkpoint."""

    spec: ModelSpec
    # A typical linear as the file's codes; None if the file holds floats.
    codes: GroupQuantizedWeight | None
    packing: StoredPacking | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the facts once, for all formats.

        Raises: CorruptModel: the typical linear cannot be read.
        """
        *_, down = checkpoint.spec.sites_of(0)
        return cls(checkpoint.spec, checkpoint.codes(f"model.layers.0.{down.modules[0]}.weight"), checkpoint.packing)


class QuantFormat(ABC):
    """Pack weights tensor by tensor while the model loads.

    A new format is one subclass in one file, and its line in `lorasrv.models.quantization.FORMATS`. The `dtype` that
    methods take matters only to formats that keep floats.
    """

    # Value of --quantization that selects the format.
    name: ClassVar[str]
    # Values of --quantization-group that the format supports; empty for formats without groups.
    groups: ClassVar[tuple[int, ...]] = ()
    # Approximate bits per weight, including scales, in the layers' linears, and in embedding and head; None: the bits
    # of the dtype.
    linear_bits: ClassVar[float | None] = None
    table_bits: ClassVar[float | None] = None
    # Whether linears compute only with `Ops`: then a row's results depend on other rows only if those of `Ops` do.
    is_batch_invariant: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        """Rate a checkpoint.

        Args:
            stored: facts of the checkpoint.
            group: one of `groups`; None lets the format choose, the file's own if it has codes of this format.
        """

    @classmethod
    @abstractmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        """Return the format, ready to pack weights.

        Args:
            ops: kernels that will compute with the weights.
            group, keep_int8_codes: see `Acceptance`; a `group` of None is the format's default.
        """

    @classmethod
    def bits_of_linears(cls, spec: ModelSpec) -> float | None:
        """Return the mean of `linear_bits` over the layers' linears of a model."""
        del spec
        return cls.linear_bits

    def of_site(self, site: str) -> "QuantFormat":
        """Return the format of the linears of one site (`SiteShape.name`)."""
        del site
        return self

    def keeps(self, codes: GroupQuantizedWeight) -> bool:
        """Return whether such codes of a file are kept unchanged, without rounding again."""
        del codes
        return False

    @abstractmethod
    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Pack a linear.

        Args:
            weight: [O, H] floats of any kind, or codes that the format keeps.
            bias: [O] floats, or None.
            dtype: dtype of weights that stay floats.
        Raises:
            UnsupportedFormat: the format cannot hold this weight.
        """

    def linear_of_parts(
        self, parts: Sequence[Tensor | GroupQuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        """Pack a linear whose outputs come in parts with the same inputs: floats, and codes that the format keeps.

        Args:
            parts: at least one has codes. Use this for parts that do not fit into a single weight.
            bias, dtype: as for `linear`.
        Raises:
            UnsupportedFormat: as for `linear`.
        """
        raise NotImplementedError(f"{self.name} keeps no codes")

    @abstractmethod
    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        """Pack an embedding. weight [V, H]: floats of any kind, or codes of 256 levels."""

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        """Pack the head of a model with a head of its own, [V, H], as `linear` does; some formats use more bits."""
        return self.linear(weight, None, dtype)

    @abstractmethod
    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        """Return the head of a model whose head is its embedding, over the same stored bytes."""
