"""Interface of a set of kernels, chosen for a device or by name. `ops.py` checks arguments, then calls these."""

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables

_BACKENDS = {
    "torch": "sgmv_kernels.torch_ops.backend",
    "numba": "sgmv_kernels.cpu_ops.backend",
    "triton": "sgmv_kernels.triton_ops.backend",
}
KERNELS = tuple(_BACKENDS)
logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """A set of kernels cannot run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    """Rows and adapters of a step, checked once for all layers and sites.

    `dtype` is that of stored panels, `num_rows` T; `prepared` is what the backend made of the tables.
    """

    tables: SgmvTables
    dtype: torch.dtype
    num_rows: int
    prepared: Any


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The B sequences of a step, checked once for all layers.

    `page_tables` [B, max pages]; `query_starts` [B + 1], the rows of each sequence, which are its last positions;
    `kv_lens`
    [B], its keys, this step's included; `num_pages`, an upper bound of page ids; `write_pages`, `write_slots` [T] int64
    on
    the device, the place of each row's own key and value; `prepared`, what the backend made of them.
    """

    page_tables: Int32
    query_starts: Int32
    kv_lens: Int32
    page_size: int
    num_pages: int
    write_pages: Tensor
    write_slots: Tensor
    prepared: Any

    @property
    def num_rows(self) -> int:
        return int(self.query_starts[-1])


@dataclass(frozen=True, slots=True)
class StepTables:
    """Keys, adapters and sampled rows of a step: all inputs of a forward pass beside tokens and positions.

    `sample_rows` [S] int64 are the rows that want logits.
    """

    attention: AttentionPlan
    lora: SgmvPlan
    sample_rows: Tensor


Angles = tuple[tuple[Tensor, Tensor], ...]
"""Cosines and sines of the rows' positions, each [T, half of the rotated numbers], for every RoPE of the model."""
Layers = Callable[[Tensor, Angles, StepTables], Tensor]
"""Function (x [T, H], angles, tables) -> logits [S, V] that consists of calls of `Ops` only."""


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Largest pass of a recording: at most `max_rows` rows, `max_samples` with logits; `angles` are the widths of
    cosines.
    """

    max_rows: int
    max_samples: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    angles: tuple[int, ...]
    page_size: int
    num_pages: int
    num_layers: int
    sites: tuple[SiteDims, ...]
    adapter_dtype: torch.dtype

    def below(self, rows: int | None) -> "ProgramShape":
        """Return the shape with fewer than `rows` rows; None leaves it unchanged."""
        return self if rows is None else replace(self, max_rows=min(self.max_rows, rows - 1))


class PackedLinear(Protocol):
    """Weight codes [O, H] in a backend's own order, with an optional bias."""

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


@dataclass(frozen=True)
class Backend:
    """Functions of one set of kernels, called with checked arguments; each is described at the method of its name in
    `ops.Ops`.
    """

    name: str
    activations: tuple[torch.dtype, ...]
    prepare_sgmv: Callable[[SgmvTables, torch.dtype, torch.device], Any]
    shrink: Callable[[Tensor, Tensor, SgmvPlan, int, int], Tensor]
    expand_: Callable[[Tensor, Tensor, Tensor, SgmvPlan, int, int], None]
    sgmv_: Callable[[Tensor, Tensor, Tensor, SgmvPlan, int, int], None]
    prepare_attention: Callable[[AttentionPlan, torch.device], Any]
    attention: Callable[[Tensor, KvPages, AttentionPlan, float, int | None, float | None], Tensor]
    rope_write_kv: Callable[[Tensor, Tensor, Tensor, KvPages, Tensor, Tensor], Tensor]
    add_rms_norm_: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    norm_heads_: Callable[[Tensor, Tensor, Tensor, int, float], None]
    softcap_: Callable[[Tensor, float], None]
    take_rows: Callable[[Tensor, Tensor], Tensor]
    pack_linear: Callable[[GroupQuantizedWeight, Tensor | None, bool], PackedLinear]
    linear: Callable[[Tensor, Any], Tensor]
    warm_up: Callable[[torch.dtype, KVFormat], None]
    # Names of the KV formats that attention and rope_write_kv read and write; None for every format.
    kv_formats: Collection[str] | None = None
    can_record: bool = False
    wide_rows: Callable[[], int | None] = lambda: None
    best_threads: Callable[[int], int] = lambda most: most


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
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> AttentionPlan:
    """Return the plan of a step's sequences without the backend's part; arguments as `Ops.plan_attention`."""
    queries, lens = np.asarray(query_lens, dtype=np.int32), np.asarray(kv_lens, dtype=np.int32)
    ends = np.cumsum(queries, dtype=np.int32)
    sequence = np.repeat(np.arange(len(queries)), queries)
    position = np.arange(len(sequence)) + (lens - ends)[sequence]
    pages, slots = page_tables[sequence, position // page_size], position % page_size
    write_pages, write_slots = upload((pages, slots), device)
    starts = np.concatenate((np.zeros(1, dtype=np.int32), ends))
    return AttentionPlan(page_tables, starts, lens, page_size, num_pages, write_pages, write_slots, None)
