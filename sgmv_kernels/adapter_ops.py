"""Public ops of adapters: SGMV, its two halves, gains and shifts, own rows of the vocabulary; see `sgmv_kernels.ops`.

Shapes: T token rows, S segments or rows with logits, R rank rows, H hidden, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from sgmv_kernels.backend import Backend
from sgmv_kernels.backend_ops import BackendOps
from sgmv_kernels.checks import FLOATS, check_adapter, check_segments, check_slab, require, site_dims
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, RowTokens
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import PlannedSgmv, SgmvPlan
from sgmv_kernels.metadata.segments import BASE, Segments
from sgmv_kernels.metadata.sgmv_tables import SgmvTables, build_tables, places_of
from sgmv_kernels.torch_ops.columns import columns_torch
from sgmv_kernels.torch_ops.vocab_rows import own_embeddings_torch_, own_logits_

KEPT_TOKENS = 64
"""Adapters whose lists of own rows stay on the device: at most as long as two vocabularies, and usually short."""


class AdapterOps(BackendOps):
    """Apply adapters to the rows of a step. A plan is made once per step and is used for every layer.

    Args: as `BackendOps`.
    """

    def __init__(self, device: torch.device, backend: Backend, *, copies: bool = False) -> None:
        super().__init__(device, backend, copies=copies)
        # For the layers, the ends outside them, and own rows of the vocabulary in the embedding and in the head.
        self._last_sgmv: deque[PlannedSgmv] = deque(maxlen=5)
        # The tokens of an adapter's own rows on the device, for each site of their layout.
        self._row_tokens = lru_cache(KEPT_TOKENS)(lambda own: upload(own.tokens, device))

    def load_kernels_of(self, layout: AdapterLayout, dtype: torch.dtype) -> None:
        """Load the kernels that few adapters need, if one of this layout does, so that no step waits for them.
        Compiling one takes seconds, once per machine.

        Args:
            dtype: dtype of stored panels that are not int8 codes.
        """
        self._backend.load_kernels_of(layout, dtype)

    def plan_sgmv(
        self,
        segments: Segments,
        adapters: Sequence[PlacedAdapter],
        dtype: torch.dtype,
        weights: Sequence[float] | None = None,
        more: Sequence[Segments] = (),
    ) -> SgmvPlan:
        """Check the arguments shared by every `sgmv_` of a step, and lay them out for the kernels.

        An earlier plan is returned if the same rows have the same placed adapters, as in most steps.

        Args:
            segments: rows by adapter, as `build_segments` makes them; `segments.adapters` index into `adapters`.
            adapters: the placed adapters of this step, of any ranks.
            dtype: dtype of stored panels that are not int8 codes.
            weights: factor of each adapter's delta; None: 1.
            more: for adapters that are sums: the same rows by the second term, by the third and so on.
        Returns: the plan of all layers and sites, with a pass for `segments` and for each of `more`.
        Raises:
            KernelArgumentError: an index, dtype, rank, offset or site does not fit.
        """
        factors = (1.0,) * len(adapters) if weights is None else tuple(weights)
        passes = (segments, *(own for own in more if (own.adapters != BASE).any()))
        known = next((last for last in self._last_sgmv if last.serves(passes, adapters, factors, dtype)), None)
        if known is None:
            require(dtype in FLOATS, f"dtype {dtype} of panels must be bfloat16, float16 or float32")
            require(len(factors) == len(adapters), f"weights must have one entry for each of {len(adapters)} adapters")
            for own in passes:
                require(own.num_rows == segments.num_rows, "more must hold the rows of segments")
                check_segments(own)
                highest = int(own.adapters.max(initial=BASE))
                require(highest < len(adapters), f"segments name adapter {highest}, but there are {len(adapters)}")
            for adapter in adapters:
                check_adapter(adapter, adapters[0], dtype)
            plan, places = None, places_of(adapters)
            for turn, own in reversed(list(enumerate(passes))):
                tables = build_tables(own, adapters, factors, places=places, turn=turn)
                plan = replace(self.plan_tables(tables, dtype), next=plan)
            assert plan is not None
            known = PlannedSgmv(passes, tuple(adapters), factors, plan, torch.get_num_threads())
            self._last_sgmv.append(known)
        return known.plan

    def plan_tables(self, tables: SgmvTables, dtype: torch.dtype) -> SgmvPlan:
        """Lay out the tables of one pass as `plan_sgmv` does, without checks."""
        prepared = self._backend.prepare_sgmv(tables, dtype, self.device)
        return SgmvPlan(tables, dtype, len(tables.permutation), prepared)

    def shrink(self, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
        """Project every row to the rank of its own adapter: the first half of `sgmv_`, for the plan's first pass.

        Semantics: sum over planes of v[:, p, :r] = x[t] @ A^T; p the place of row t in the permutation, A [r, in] the
        stacked lora_a of row t's adapter, unscaled. Rows and columns without an adapter are undefined.

        Args: as `sgmv_`.
        Returns: [planes, T, highest R of the step at this site] fp32; a backend may split the sum over planes.
        Raises:
            KernelArgumentError: as `sgmv_`.
        Source: split sums without atomics, SGLang's `triton_v2` planes.
        """
        check_slab(slab, plan, self.device)
        self._check_rows(x, "x", plan, site_dims(plan, layer, site)[0])
        return self._backend.shrink(x, slab, plan, layer, site)

    def expand_(self, y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
        """Project every row from the rank of its own adapter and add it to y: the second half of `sgmv_`, for the
        plan's first pass.

        Semantics: y[t, slice] += (weight * scale * sum over planes of v[:, p])[slice's ranks] @ B[slice]; p the place
        of row t in the permutation, scale [R] = alpha / r (or alpha / sqrt r) of every rank row

        Args:
            y: as in `sgmv_`, or columns of wider rows.
            v: [planes, T, R] fp32, from `shrink` with the same plan and the same layer and site, or one with the same
                ranks.
            Others as `sgmv_`.
        Raises:
            KernelArgumentError: as `sgmv_`, or v does not fit.
        """
        check_slab(slab, plan, self.device)
        self._check_rows(y, "y", plan, site_dims(plan, layer, site)[1], part_of_rows=True)
        if not plan.tables.num_segments:
            return
        rank = plan.tables.max_rank(layer, site)
        fits = v.dtype == torch.float32 and v.dim() == 3 and v.shape[1] == plan.num_rows and v.shape[2] >= rank
        require(fits and v.is_contiguous(), f"v must be contiguous float32 [planes, {plan.num_rows}, >= {rank}]")
        self._backend.expand_(y, v, slab, plan, layer, site)

    def columns(self, ids: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, firsts: Sequence[int]) -> Tensor:
        """Return the column of A for each row's token, in the row's own adapter: `shrink` of one-hot rows.

        Semantics: v[0, p, :r] = A[:, ids[t] - firsts[b]] of block b, which is layer b of row t's adapter; p the place
        of row t in the permutation, b = ids[t] // W, W the inputs of the site. Elements without an adapter are 0.

        Args:
            ids: [T] int64 tokens.
            slabs: [L, bytes] uint8, all layers of the plan.
            plan: the step's rows and adapters.
            site: which panels to read; they have the same ranks in every layer.
            firsts: the first token of each block.
        Returns: [1, T, highest R of the step at this site] fp32.
        Raises:
            KernelArgumentError: a shape or dtype does not fit.
        """
        fits = ids.dtype == torch.int64 and ids.shape == (plan.num_rows,)
        require(fits, f"ids must be int64 [{plan.num_rows}]")
        layers = len(plan.tables.records) if plan.tables.num_segments else len(slabs)
        require(slabs.dim() == 2 and slabs.is_contiguous(), "slabs must be contiguous [L, bytes]")
        require(len(slabs) == len(firsts) == layers, f"slabs and firsts must have {layers} layers")
        check_slab(slabs[0], plan, self.device)
        return columns_torch(ids, slabs, plan, site, firsts)

    def own_embeddings_(
        self, x: Tensor, ids: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, tokens: Sequence[RowTokens]
    ) -> None:
        """Replace the embedding of every token for which the row's adapter has its own row, in place.

        Semantics: x[t] = row of ids[t] of row t's adapter, where it has one

        Args:
            x: [T, H], written in place.
            ids: [T] int64 tokens.
            slabs: [slabs, bytes] uint8; block b of rows is layer b of the plan, in slab b modulo the number of slabs.
            plan: the step's rows and adapters, with layouts of own rows.
            site: which rows.
            tokens: the tokens of the own rows of each segment of the plan.
        Raises:
            KernelArgumentError: a shape or dtype does not fit.
        """
        fits = ids.dtype == torch.int64 and ids.shape == (plan.num_rows,)
        require(fits, f"ids must be int64 [{plan.num_rows}]")
        self._check_own_rows(slabs, plan, tokens)
        self._check_rows(x, "x", plan, site_dims(plan, 0, site)[0])
        known = [self._row_tokens(own)[site] for own in tokens]
        own_embeddings_torch_(x, ids, slabs, plan, site, tokens, known)

    def own_logits_(
        self, logits: Tensor, states: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, tokens: Sequence[RowTokens]
    ) -> None:
        """Replace the logits of tokens for which a row's adapter has its own rows, in place.

        Semantics: logits[t, token] = states[t] . row of this token of row t's adapter, where it has one. Sums are fp32,
        and a row's result does not depend on other rows.

        Args:
            logits: [S, V], written in place; V exceeds every token.
            states: [S, H] contiguous.
            Others as `own_embeddings_`.
        Raises:
            KernelArgumentError: a shape or dtype does not fit.
        """
        self._check_own_rows(slabs, plan, tokens)
        self._check_rows(states, "states", plan, site_dims(plan, 0, site)[0])
        highest = max((int(own.tokens[site].max(initial=-1)) for own in tokens), default=-1)
        fits = logits.dim() == 2 and len(logits) == len(states) and logits.shape[1] > highest
        require(fits, f"logits must be [{len(states)}, over {highest}]")
        known = [self._row_tokens(own)[site] for own in tokens]
        own_logits_(logits, states, slabs, plan, site, tokens, known, self.shrink)

    def sgmv_(self, y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
        """Add every row's own adapter delta to the output of a base linear, in place, all slices in one call.

        Sums are fp32, and a row's result does not depend on other rows.

        Semantics: y[t, slice] += (weight * scale * (x[t] @ A^T))[slice's ranks] @ B[slice], A and B of row t's adapter,
        if any; for a sum term by term, in the order of the plan's passes

        Args:
            y: [T, sum of slice widths], the base linear's output, contiguous; written in place.
            x: [T, in], its input, contiguous, of y's dtype: fp32 on the CPU, fp32, bf16 or fp16 on a GPU.
            slab: [bytes] uint8, one layer of the pool.
            plan: the step's rows and adapters.
            layer, site: which panels to read.
        Raises:
            KernelArgumentError: a shape or dtype does not fit; nothing has been written.
        Source: SGMV of Punica (Chen et al. 2023), true ranks and pages shared with KV after S-LoRA (Sheng et al. 2023).
        """
        inputs, outputs = site_dims(plan, layer, site)
        self._check_rows(x, "x", plan, inputs)
        self._check_rows(y, "y", plan, outputs)
        require(x.dtype == y.dtype, "x and y must have the same dtype")
        check_slab(slab, plan, self.device)
        own: SgmvPlan | None = plan
        while own is not None:
            if own.tables.num_segments:
                self._backend.sgmv_(y, x, slab, own, layer, site)
            own = own.next

    def affine_(self, y: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, place: int) -> None:
        """Multiply every row of an output by its own adapter's gain and add its shift, in place, where it has them.

        Semantics: y[t] = gain * y[t] + weight * shift, of row t's adapter at this place; 1 and 0 where it has none;
        for a sum, whose adapters have no gains, term by term

        Args:
            y: [T, width of the place], contiguous; written in place. fp32 on the CPU, fp32, bf16 or fp16 on a GPU.
            slab: [bytes] uint8, one layer of the pool.
            plan: the step's rows and adapters.
            layer, place: which vectors to read.
        Raises:
            KernelArgumentError: a shape or dtype does not fit; nothing has been written.
        Source: magnitudes of DoRA (Liu et al. 2024) as an output gain.
        """
        check_slab(slab, plan, self.device)
        if plan.tables.has_vectors:
            inside = 0 <= layer < len(plan.tables.vectors) and 0 <= place < len(plan.tables.places)
            require(inside, f"layer {layer}, place {place}: the adapters have none such")
            self._check_rows(y, "y", plan, plan.tables.places[place])
            for own in plan.passes():
                self._backend.affine_(y, slab, own, layer, place)

    def _check_own_rows(self, slabs: Tensor, plan: SgmvPlan, tokens: Sequence[RowTokens]) -> None:
        require(slabs.dim() == 2 and slabs.is_contiguous(), "slabs must be contiguous [slabs, bytes]")
        check_slab(slabs[0], plan, self.device)
        require(len(tokens) == plan.tables.num_segments, f"tokens must be of {plan.tables.num_segments} segments")

    def _check_rows(self, x: Tensor, name: str, plan: SgmvPlan, columns: int, *, part_of_rows: bool = False) -> None:
        self._check_activation(x, name)
        if x.dim() != 2 or not (x.is_contiguous() or (part_of_rows and x.stride(1) == 1)):
            raise KernelArgumentError(f"{name} must be contiguous [T, columns]")
        if x.shape[0] != plan.num_rows:
            raise KernelArgumentError(f"{name} has {x.shape[0]} rows, the plan has {plan.num_rows}: not the same rows")
        if x.shape[1] != columns and plan.tables.num_segments:
            raise KernelArgumentError(f"{name} has {x.shape[1]} columns, the site has {columns}")
