"""Define the interface of a set of kernels, and choose one by device or name. `sgmv_kernels.ops` calls it with checked
arguments.
"""

import importlib
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PlacedAdapter, SiteDims
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import DraftTrees
from sgmv_kernels.metadata.h2d import Ints, upload
from sgmv_kernels.metadata.segments import Int32, Segments
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

_BACKENDS = {
    "torch": "sgmv_kernels.torch_ops.backend",
    "numba": "sgmv_kernels.cpu_ops.backend",
    "triton": "sgmv_kernels.triton_ops.backend",
}
KERNELS = tuple(_BACKENDS)
NO_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""
logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """Report that a set of kernels cannot run on this machine, and why."""


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    """Hold the rows and adapters of a step, checked once for all layers and sites.

    Rows whose adapters are sums of several have further passes, with their second terms, their third and so on.
    """

    tables: SgmvTables
    # Of the stored panels that are not int8 codes.
    dtype: torch.dtype
    # T.
    num_rows: int
    # The backend's own form of the tables.
    prepared: Any
    # The next pass; None behind the last.
    next: "SgmvPlan | None" = None

    def passes(self) -> Iterator["SgmvPlan"]:
        """Yield this pass and those behind it."""
        plan: SgmvPlan | None = self
        while plan is not None:
            yield plan
            plan = plan.next

    @property
    def num_passes(self) -> int:
        """Return how many passes have adapters: 0 for rows of the base alone."""
        return sum(1 for own in self.passes() if own.tables.num_segments)


@dataclass(frozen=True, slots=True)
class PlannedSgmv:
    """Remember what a plan was made of."""

    passes: tuple[Segments, ...]
    adapters: tuple[PlacedAdapter, ...]
    weights: tuple[float, ...]
    plan: SgmvPlan
    # Threads that the plan has room for: each writes results of its own.
    threads: int

    def serves(
        self,
        passes: Sequence[Segments],
        adapters: Sequence[PlacedAdapter],
        weights: tuple[float, ...],
        dtype: torch.dtype,
    ) -> bool:
        """Return whether a plan of these would be the same; placed adapters do not change, moved ones are others."""
        return (
            dtype == self.plan.dtype
            and len(adapters) == len(self.adapters)
            and len(passes) == len(self.passes)
            and all(map(operator.is_, adapters, self.adapters))
            and weights == self.weights
            and torch.get_num_threads() == self.threads
            and all(map(Segments.equals, passes, self.passes))
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Hold the B sequences of a step, checked once for all layers."""

    # [B, max pages].
    page_tables: Int32
    # [B + 1], bounds of each sequence's rows, which are its last positions.
    query_starts: Int32
    # [B], keys of each sequence, including this step's.
    kv_lens: Int32
    page_size: int
    # Upper bound of page ids.
    num_pages: int
    # [T] int64 on the device: page and slot in which each row's own key and value are stored.
    write_pages: Tensor
    write_slots: Tensor
    # The backend's own form of the sequences.
    prepared: Any
    # None if no sequence has a draft tree.
    trees: DraftTrees | None = None

    @property
    def num_rows(self) -> int:
        """Return T, the rows of all sequences; in a graph those behind them, too, that only pad it."""
        return len(self.write_pages)


class RowPlaces(NamedTuple):
    """Say where the rows of B sequences are in the pool, on the host."""

    # [B + 1], [B]: as in `AttentionPlan`.
    query_starts: Int32
    kv_lens: Int32
    # [T]: page and slot in which each row's own key and value are stored.
    pages: Ints
    slots: Ints

    @classmethod
    def of(
        cls,
        page_tables: Int32,
        query_lens: Sequence[int] | Ints,
        kv_lens: Sequence[int] | Ints,
        page_size: int,
    ) -> "RowPlaces":
        """Return the places of a step's rows; arguments as `Ops.plan_attention`."""
        queries, lens = np.asarray(query_lens, dtype=np.int32), np.asarray(kv_lens, dtype=np.int32)
        starts = np.zeros(len(queries) + 1, dtype=np.int32)
        ends = queries.cumsum(dtype=np.int32, out=starts[1:])
        sequence = np.arange(len(queries)).repeat(queries)
        position = np.arange(len(sequence)) + (lens - ends)[sequence]
        return cls(starts, lens, page_tables[sequence, position // page_size], position % page_size)


@dataclass(frozen=True, slots=True)
class PageMasses:
    """Add up how much attention some rows of a step give to each page that they see; serves one plan."""

    # [B] int32, last rows of each sequence that are observed; they have no draft trees.
    counts: Int32
    # [key heads, observed rows, most pages of the sequences] fp32 on the device: a key head has the sum of its query
    # heads, over layers.
    sums: Tensor
    # The backend's own tables, by what they depend on besides the plan.
    prepared: dict[Any, Any] = field(default_factory=dict)

    def of_rows(self) -> Tensor:
        """Return the sums over key heads, [observed rows, most pages]; one after another, so that a row's bits do not
        depend on the number of rows.
        """
        total = self.sums[0].clone()
        for of_head in self.sums[1:]:
            total += of_head
        return total


@dataclass(frozen=True, slots=True)
class StepTables:
    """Hold all inputs of a forward pass besides tokens and positions."""

    attention: AttentionPlan
    lora: SgmvPlan
    # [S] int64, rows that need logits.
    sample_rows: Tensor
    # None if no row is observed.
    masses: PageMasses | None = None


Angles = tuple[tuple[Tensor, Tensor], ...]
"""Cosines and sines of the rows' positions, each [T, half of the rotated numbers], for every RoPE of the model."""
Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""
Layers = Callable[[Tensor, Angles, StepTables], Tensor]
"""Function (x [T, H], angles, tables) -> logits [S, V]."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Hold the functions that a forward pass consists of, each of calls of `Ops` only."""

    # ids [T] int64 -> x [T, H]; None if that is computed otherwise.
    embed: Callable[[Tensor], Tensor] | None
    layers: Layers
    # Logits [S, V], which it may change -> their likeliest tokens [S] int64.
    choose: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Describe the largest pass that a recording can run."""

    max_rows: int
    # Largest number of rows with logits.
    max_samples: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Widths of the cosines of each RoPE.
    angles: tuple[int, ...]
    page_size: int
    num_pages: int
    num_layers: int
    sites: tuple[SiteDims, ...]
    adapter_dtype: torch.dtype
    # Widths of the outputs of a layer at which adapters may have vectors.
    places: tuple[int, ...] = ()

    def below(self, rows: int | None) -> "ProgramShape":
        """Return the shape with fewer than `rows` rows; None leaves it unchanged."""
        return self if rows is None else replace(self, max_rows=min(self.max_rows, rows - 1))


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
    attention: Callable[[Tensor, KvPages, AttentionPlan, float, int | None, float | None, Tensor | None], Tensor]
    add_page_mass_: Callable[[PageMasses, Tensor, KvPages, AttentionPlan, float, float | None], None]
    # The last argument is the number of key heads in the rows: those of the pages, or 0 for queries alone.
    rope_write_kv: Callable[[Tensor, Tensor, Tensor, KvPages, Tensor, Tensor, int], Tensor]
    copy_slots: Callable[[Sequence[KvPages], Int32], None]
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


def plan_of(
    page_tables: Int32,
    query_lens: Sequence[int] | Ints,
    kv_lens: Sequence[int] | Ints,
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> AttentionPlan:
    """Return the plan of a step's sequences without the backend's part; arguments as `Ops.plan_attention`."""
    places = RowPlaces.of(page_tables, query_lens, kv_lens, page_size)
    write_pages, write_slots = upload((places.pages, places.slots), device)
    return AttentionPlan(
        page_tables, places.query_starts, places.kv_lens, page_size, num_pages, write_pages, write_slots, None
    )
