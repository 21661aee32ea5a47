"""Define the interface of a set of kernels, and choose one by device or name. `sgmv_kernels.ops` calls it with checked
arguments.
"""

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import AdapterLayout
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses, SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

_BACKENDS = {
    "torch": "sgmv_kernels.torch_ops.backend",
    "numba": "sgmv_kernels.cpu_ops.backend",
    "triton": "sgmv_kernels.triton_ops.backend",
}
KERNELS = tuple(_BACKENDS)
NO_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""
logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """Report that a set of kernels cannot run on this machine, and why."""


class Scoring(NamedTuple):
    """Say how a layer scores the keys that a row sees; `Ops.paged_attention` has the formula."""

    # Factor of the scores.
    scale: float
    # Keys that a row sees, its own included; None for all.
    window: int | None = None
    # Bound of the scores; None for no bound (Gemma 2).
    softcap: float | None = None
    # [heads] fp32, what a head's scores lose for each token of distance (ALiBi); None for nothing.
    slopes: Tensor | None = None


class PackedLinear(Protocol):
    """Hold quantized weights [O, H] in a backend's own order, with an optional bias."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def dequantize(self) -> Tensor:
        """Return the weights that the arithmetic uses, exactly, [O, H] fp32."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, ids [N] int64 -> [N, H] fp32: an embedding over the same bytes."""
        ...


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Hold a linear whose outputs are packed in parts, one after another; see `PackedLinear`."""

    parts: tuple[PackedLinear, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self.parts])

    def rows(self, ids: Tensor) -> Tensor:
        return self.dequantize()[ids]


@dataclass(frozen=True)
class Backend:
    """Bundle the functions of one set of kernels. `ops.Ops` documents each in its method of the same name."""

    name: str
    activations: tuple[torch.dtype, ...]
    prepare_sgmv: Callable[[SgmvTables, torch.dtype, torch.device], Any]
    shrink: Callable[[Tensor, Tensor, SgmvPlan, int, int], Tensor]
    expand_: Callable[[Tensor, Tensor, Tensor, SgmvPlan, int, int], None]
    sgmv_: Callable[[Tensor, Tensor, Tensor, SgmvPlan, int, int], None]
    affine_: Callable[[Tensor, Tensor, SgmvPlan, int, int], None]
    prepare_attention: Callable[[AttentionPlan, torch.device], Any]
    attention: Callable[[Tensor, KvPages, AttentionPlan, Scoring], Tensor]
    add_page_mass_: Callable[[PageMasses, Tensor, KvPages, AttentionPlan, Scoring], None]
    # The last argument is the number of key heads in the rows: those of the pages, or 0 for queries alone.
    rope_write_kv: Callable[[Tensor, Tensor, Tensor, KvPages, Tensor, Tensor, int], Tensor]
    copy_slots: Callable[[Sequence[KvPages], Int32], None]
    add_: Callable[[Tensor, Tensor], None]
    add_rms_norm_: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    add_layer_norm_: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    norm_heads_: Callable[[Tensor, Tensor, Tensor, int, float], None]
    softcap_: Callable[[Tensor, float], None]
    take_rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    likeliest: Callable[[Tensor], Tensor]
    pack_linear: Callable[[GroupQuantizedWeight, Tensor | None, bool], PackedLinear]
    # Raises KernelArgumentError for codes that `pack_linear` does not take.
    check_codes: Callable[[GroupQuantizedWeight], None]
    linear: Callable[[Tensor, Any], Tensor]
    # The same for parts with the same inputs, side by side in one result.
    linear_parts: Callable[[Tensor, Sequence[Any]], Tensor]
    warm_up: Callable[[torch.dtype, KVFormat, Progress], None]
    # Load the kernels that only adapters of this layout need.
    load_kernels_of: Callable[[AdapterLayout, torch.dtype], None] = lambda layout, dtype: None
    # Names of the KV formats that attention, rope_write_kv and copy_slots read and write; None for every format.
    kv_formats: Collection[str] | None = None
    # Whether launches can be recorded and run together.
    can_record: bool = False
    # Whether a row's results are the same bits whatever other rows there are.
    is_batch_invariant: bool = False
    # Number of rows from which a bf16 copy of a weight is faster; None for never.
    wide_rows: Callable[[], int | None] = lambda: None
    # Fastest number of threads up to a limit.
    best_threads: Callable[[int], int] = lambda limit: limit


def one_by_one(linear: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Sequence[Any]], Tensor]:
    """Return a `Backend.linear_parts` that multiplies by each part, and copies."""
    return lambda x, parts: torch.cat([linear(x, part) for part in parts], dim=1)


@cache
def load_backend(name: str) -> Backend:
    """Import the kernels called `name`.

    Raises:
        KernelsUnavailable: the name is unknown, or the kernels cannot run here.
    """
    if name not in KERNELS:
        raise KernelsUnavailable(f"kernels {name!r} are unknown; choose from {', '.join(KERNELS)}")
    try:
        module = importlib.import_module(_BACKENDS[name])
    except ImportError as error:
        raise KernelsUnavailable(f"kernels {name!r} cannot run here: {error}") from error
    backend: Backend = module.BACKEND
    return backend


def choose_backend(device: torch.device) -> Backend:
    """Return the fastest kernels for a device; plain torch, with a warning, where those cannot run."""
    wanted = "triton" if device.type == "cuda" else "numba" if device.type == "cpu" else "torch"
    try:
        return load_backend(wanted)
    except KernelsUnavailable as error:
        logger.warning("%s; using plain torch, which is slower", error)
        return load_backend("torch")
