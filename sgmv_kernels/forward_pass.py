"""Description of a forward pass for recording it: its functions, their inputs, and its largest size."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses, SgmvPlan


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
Layers = Callable[[Tensor, Angles, StepTables], Tensor]
"""Function (x [T, H], angles, tables) -> logits [S, V]."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Hold the functions of a forward pass; each computes only through `Ops`."""

    # ids [T] int64 -> x [T, H]; None if x is computed in another way.
    embed: Callable[[Tensor], Tensor] | None
    layers: Layers
    # Logits [S, V], which the function may change -> their likeliest tokens [S] int64.
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
