"""Check arguments and call the kernels of the chosen backend: the public ops, through which other packages compute.

Shapes: T token rows, S segments, R rank rows, P pages, B sequences, D head dim, H hidden, F intermediate.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import (
    KERNELS,
    Angles,
    AttentionPlan,
    KernelsUnavailable,
    Layers,
    PackedLinear,
    PackedParts,
    PageMasses,
    PlannedSgmv,
    ProgramShape,
    Progress,
    SgmvPlan,
    StepTables,
    choose_backend,
    load_backend,
    plan_of,
)
from sgmv_kernels.checks import (
    FLOATS,
    check_adapter,
    check_masses,
    check_moves,
    check_pages,
    check_queries,
    check_rotated,
    check_segments,
    check_sequences,
    check_slab,
    check_trees,
    require,
    site_dims,
)
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import PlacedAdapter, RowTokens
from sgmv_kernels.formats.group_quant import (
    INT4_LEVELS,
    INT8_LEVELS,
    Q3H_LEVELS,
    GroupQuantizedWeight,
    join_codes,
    stack_codes,
)
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import Parents, build_trees
from sgmv_kernels.metadata.segments import BASE, Int32, Segments
from sgmv_kernels.metadata.sgmv_tables import SgmvTables, build_tables, places_of
from sgmv_kernels.pointwise_ops import PointwiseOps
from sgmv_kernels.torch_ops.columns import columns_torch
from sgmv_kernels.torch_ops.vocab_rows import own_embeddings_torch_, own_logits_

if TYPE_CHECKING:
    from sgmv_kernels.cpu_ops.recorded_step import RecordedStep

__all__ = [
    "INT4_LEVELS",
    "INT8_LEVELS",
    "KERNELS",
    "Q3H_LEVELS",
    "Angles",
    "AttentionPlan",
    "GroupQuantizedWeight",
    "KernelArgumentError",
    "KernelsUnavailable",
    "Ops",
    "PackedLinear",
    "ProgramShape",
    "SgmvPlan",
    "StepTables",
    "join_codes",
    "stack_codes",
]
logger = logging.getLogger(__name__)


class Ops(PointwiseOps):
    """Run the ops on one device. Plans are made once a step and serve every layer.

    Args:
        device: where the tensors are.
        kernels: one of `KERNELS`; None takes the fastest that run on the device.
        copies: linears may keep a bf16 copy for many rows; without it, a row's result does not depend on other rows.
    Raises:
        KernelsUnavailable: the kernels that were chosen by name cannot run here.
    """

    def __init__(self, device: torch.device, kernels: str | None = None, *, copies: bool = False) -> None:
        self._copies = copies
        # Of the layers, of what lies outside them, and of own rows of the vocabulary, in the embedding and in the head.
        self._last_sgmv: deque[PlannedSgmv] = deque(maxlen=5)
        self._chosen = kernels is not None
        super().__init__(device, choose_backend(device) if kernels is None else load_backend(kernels))
        if self._backend.name == "numba" and device.type != "cpu":
            raise KernelsUnavailable("kernels 'numba' run on the CPU only")

    @property
    def name(self) -> str:
        """Return the name of the kernels."""
        return self._backend.name

    @property
    def can_record(self) -> bool:
        """Return whether launches can be recorded and run together (`cpu_ops.recorded_step`)."""
        return self._backend.can_record

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether a row's results are the same bits whatever other rows there are."""
        has_copies = self._copies and self._backend.wide_rows() is not None
        return self._backend.is_batch_invariant and not has_copies

    def best_threads(self, most: int) -> int:
        """Return the fastest number of threads up to `most`; may measure, in the calling thread's team."""
        return self._backend.best_threads(most)

    def program(self, layers: Layers, shape: ProgramShape) -> "RecordedStep":
        """Return a program that runs a model's layers from recordings, where no linear takes other kernels."""
        from sgmv_kernels.cpu_ops.recorded_step import RecordedStep

        return RecordedStep(layers, shape.below(self._backend.wide_rows() if self._copies else None), self)

    def warm_up(
        self, adapter_dtype: torch.dtype, kv_format: KVFormat, progress: Progress = lambda what, share: None
    ) -> None:
        """Compile the kernels for these adapter panels and KV pages, so that no request waits for it.

        If the kernels cannot run and were not chosen by name, plain torch replaces them.

        Raises:
            KernelsUnavailable: the kernels that were chosen by name do not compile, or do not read this KV format.
        """
        try:
            if not self._reads(kv_format):
                raise KernelsUnavailable(f"they do not read the KV format {kv_format.name!r}")
            self._backend.warm_up(adapter_dtype, kv_format, progress)
        except Exception as error:
            if self._chosen:
                raise KernelsUnavailable(f"kernels {self.name!r} cannot run here: {error}") from error
            logger.warning("kernels %r cannot run here: %s; using plain torch, which is slower", self.name, error)
            self._backend = load_backend("torch")

    def plan_sgmv(
        self,
        segments: Segments,
        adapters: Sequence[PlacedAdapter],
        dtype: torch.dtype,
        weights: Sequence[float] | None = None,
        more: Sequence[Segments] = (),
    ) -> SgmvPlan:
        """Check what is the same for every `sgmv_` of a step, and lay it out for the kernels.

        While the same rows stay with the same placed adapters, which is most of the time, the last plan is returned.

        Args:
            segments: rows by adapter, as `build_segments` makes them; `segments.adapters` index into `adapters`.
            adapters: the placed adapters of this step, of any ranks.
            dtype: of stored panels that are not int8 codes.
            weights: factor of what each adapter adds; None: 1.
            more: the same rows by the second term of their adapters that are sums, by the third and so on.
        Returns: the plan of all layers and sites, with a pass for each of `segments` and `more`.
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
        """Lay tables of one pass out as `plan_sgmv` does, without checks."""
        prepared = self._backend.prepare_sgmv(tables, dtype, self.device)
        return SgmvPlan(tables, dtype, len(tables.permutation), prepared)

    def shrink(self, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
        """Project every row to the rank of its own adapter: the first half of `sgmv_`, of the plan's first pass.

        Semantics: sum over planes of v[:, p, :r] = x[t] @ A^T; p the place of row t in the permutation, A [r, in] the
        stacked lora_a of row t's adapter, unscaled. Rows and columns that no adapter owns are undefined.

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
        """Project every row from the rank of its own adapter and add it to y: the second half of `sgmv_`, of the
        plan's first pass.

        Semantics: y[t, slice] += (weight * scale * sum over planes of v[:, p])[slice's ranks] @ B[slice]; p the place
        of row t in the permutation, scale [R] = alpha / r (or alpha / sqrt r) of every rank row

        Args:
            y: as in `sgmv_`, or columns of wider rows.
            v: [planes, T, R] fp32, from `shrink` with the same plan, of the same layer and site or of one whose ranks
                are the same.
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
        """Return the column of A that each row's token has in its own adapter: `shrink` of rows that are 1 there.

        Semantics: v[0, p, :r] = A[:, ids[t] - firsts[b]] of block b, which is layer b of row t's adapter; p the place
        of row t in the permutation, b = ids[t] // W, W the inputs of the site. What no adapter owns is 0.

        Args:
            ids: [T] int64 tokens.
            slabs: [L, bytes] uint8, all layers of the plan.
            plan: the step's rows and adapters.
            site: which panels to read, of the same ranks in every layer.
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
        """Replace the embedding of every token that has a row of its own in its adapter, in place.

        Semantics: x[t] = row of ids[t] of row t's adapter, where it has one

        Args:
            x: [T, H], written in place.
            ids: [T] int64 tokens.
            slabs: [slabs, bytes] uint8; block b of rows is layer b of the plan, and in slab b modulo their number.
            plan: the step's rows and adapters, of layouts of rows.
            site: which rows.
            tokens: what the rows of each segment of the plan stand for.
        Raises:
            KernelArgumentError: a shape or dtype does not fit.
        """
        fits = ids.dtype == torch.int64 and ids.shape == (plan.num_rows,)
        require(fits, f"ids must be int64 [{plan.num_rows}]")
        self._check_own_rows(slabs, plan, tokens)
        self._check_rows(x, "x", plan, site_dims(plan, 0, site)[0])
        own_embeddings_torch_(x, ids, slabs, plan, site, tokens)

    def own_logits_(
        self, logits: Tensor, states: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, tokens: Sequence[RowTokens]
    ) -> None:
        """Replace the logits of tokens that have rows of their own in a row's adapter, in place.

        Semantics: logits[t, token] = states[t] . row of this token of row t's adapter, where it has one. Sums are fp32,
        and a row's result does not depend on the rows beside it.

        Args:
            logits: [S, V], written in place; V above every token.
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
        own_logits_(logits, states, slabs, plan, site, tokens, self.shrink)

    def _check_own_rows(self, slabs: Tensor, plan: SgmvPlan, tokens: Sequence[RowTokens]) -> None:
        require(slabs.dim() == 2 and slabs.is_contiguous(), "slabs must be contiguous [slabs, bytes]")
        check_slab(slabs[0], plan, self.device)
        require(len(tokens) == plan.tables.num_segments, f"tokens must be of {plan.tables.num_segments} segments")

    def sgmv_(self, y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
        """Add every row's own adapter delta to the output of a base linear, in place, all slices in one call.

        Sums are fp32, and a row's result does not depend on the rows beside it.

        Semantics: y[t, slice] += (weight * scale * (x[t] @ A^T))[slice's ranks] @ B[slice], A and B of row t's adapter,
        if any; of a sum term by term, in the order of the plan's passes

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
        of a sum, whose adapters have no gains, term by term

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

    def plan_attention(
        self,
        page_tables: Int32,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_size: int,
        num_pages: int,
        parents: Sequence[Parents] = (),
    ) -> AttentionPlan:
        """Check a step's sequences and lay them out, once for all layers.

        Args:
            page_tables: [B, max pages] int32 page ids in order; entries past a sequence's pages are ignored.
            query_lens: rows of each sequence; they are its last slots.
            kv_lens: keys of each sequence, this step's included.
            page_size: tokens of a page.
            num_pages: pages of the pool.
            parents: draft trees, in the last slots (`metadata.draft_trees`): one a sequence, () for none; or nothing.
        Returns: the plan of all layers.
        Raises:
            KernelArgumentError: lengths that contradict each other, a page id outside the pool, or a tree of more than
                64 slots or with a parent behind its child.
        """
        check_sequences(page_tables, query_lens, kv_lens, page_size, num_pages)
        tables = page_tables.copy()
        plan = plan_of(tables, query_lens, kv_lens, page_size, num_pages, self.device)
        if any(parents):
            check_trees(parents, kv_lens)
            plan = replace(plan, trees=build_trees(parents, np.diff(plan.query_starts), plan.kv_lens))
        return replace(plan, prepared=self._backend.prepare_attention(plan, self.device))

    def paged_attention(
        self,
        q: Tensor,
        kv: KvPages,
        plan: AttentionPlan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Tensor | None = None,
        masses: PageMasses | None = None,
    ) -> Tensor:
        """Compute causal attention of prefill chunks and single-token decodes in one call, over paged keys and values.

        Semantics: out[t] = softmax(cap(scale * q[t] . K[j]) + slope * (p(j) - p(t)), j seen by t) V; the position p of
        a draft token is that of its depth in the tree; a row sees the keys up to its own, of its draft tree only its
        ancestors and itself, and where given only those of the last `window` positions; cap(s) = softcap * tanh(s /
        softcap), or s; query head h reads key head h // (heads / kv_heads); a row that sees no key gives zeros

        Args:
            q: [T, heads, D] contiguous; the rows of sequence i follow those of i - 1. fp32 on the CPU.
            kv: one layer of the pool.
            plan: the step's sequences.
            scale: factor of the scores.
            window: keys that a row sees, its own included; None for all.
            softcap: bound of the scores; None for no bound (Gemma 2).
            slopes: [heads] fp32, what a head's scores lose for each token of distance (ALiBi); None for nothing.
            masses: gets the softmax's weights of observed rows added, by page; with neither window nor slopes.
        Returns: [T, heads, D] in q's dtype.
        Raises:
            KernelArgumentError: shapes that do not fit, or a KV format that the kernels do not read.
        Source: paged KV of vLLM (Kwon et al. 2023); online softmax of FlashAttention-2 (Dao 2023); splits of keys of
            Flash-Decoding (Dao et al. 2023); draft trees of SpecInfer (Miao et al. 2024); ALiBi (Press et al. 2022).
        """
        self._check_activation(q, "q")
        check_queries(q, kv, window, softcap, slopes)
        check_masses(masses, kv, plan, window, slopes)
        require(plan.num_rows == q.shape[0], "query_lens must sum to the rows of q")
        self._check_pages(kv, plan)
        if masses is not None:
            self._backend.add_page_mass_(masses, q, kv, plan, scale, softcap)
        return self._backend.attention(q, kv, plan, scale, window, softcap, slopes)

    def rope_write_kv(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan) -> Tensor:
        """Rotate queries and keys, and store keys and values in their pages.

        Semantics: q, k, v = split(qkv); (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for every head of q and k, x1
        and x2 the halves of its first N numbers; k[t] and v[t] are stored at row t's place, in the pages' format

        Args:
            qkv: [T, (heads + 2 kv_heads) * D] contiguous, fp32 on the CPU. Undefined afterwards.
            cos, sin: [T, N / 2] fp32; N <= D, the other numbers of a head are not rotated.
            kv: one layer of the pool.
            plan: the step's sequences.
        Returns: q [T, heads, D], contiguous.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit, or a KV format that the kernels do not write.
        Source: rotary embedding (Su et al. 2021) in Hugging Face's half-split order.
        """
        return self._rotate(qkv, cos, sin, kv, plan, kv.num_heads)

    def rope_queries(self, q: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan) -> Tensor:
        """Rotate queries of a layer that reads the keys and values of another.

        Semantics: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for every head of q, x1 and x2 the halves of its first
        N numbers

        Args:
            q: [T, heads * D] contiguous, fp32 on the CPU. Undefined afterwards.
            kv: what the queries will read; nothing is written. Others as `rope_write_kv`.
        Returns: q [T, heads, D], contiguous.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit, or a KV format that the kernels do not read.
        """
        return self._rotate(q, cos, sin, kv, plan, 0)

    def copy_slots(self, layers: Sequence[KvPages], moves: Int32) -> None:
        """Copy keys and values of single tokens, such as accepted drafts of a tree, to other slots, in all layers.

        Semantics: K[layer, target] = K[layer, source], V likewise, for one move after the other

        Args:
            layers: all layers of a pool, in order.
            moves: [N, 4] int32, source page and slot in it, target page and slot in it.
        Raises:
            KernelArgumentError: a move outside the pages, a target that a later move reads, layers of different pools,
                or a KV format that the kernels do not write.
        """
        check_moves(layers, moves)
        self._check_format(layers[0])
        if len(moves):
            self._backend.copy_slots(layers, moves)

    def reads(self, codes: GroupQuantizedWeight) -> bool:
        """Return whether these kernels read codes in such groups, with such factors."""
        try:
            self._backend.check_codes(codes)
        except KernelArgumentError:
            return False
        return True

    def pack_linear(
        self, codes: GroupQuantizedWeight, bias: Tensor | None = None, *, few_rows: bool = False
    ) -> PackedLinear:
        """Bring weight codes into the order that these kernels read; a copy, or the codes themselves.

        Args:
            codes: [O, H], on these kernels' device.
            bias: [O] fp32, or None for 0.
            few_rows: True for an embedding or a head, which is never multiplied with as many rows as layers are.
        Returns: the linear for `linear`.
        Raises:
            KernelArgumentError: groups that the kernels cannot read, or shapes that do not fit.
        """
        require(codes.codes.device.type == self.device.type, f"codes must be on {self.device}")
        fits = bias is None or (bias.shape == (codes.out_features,) and bias.dtype == torch.float32)
        require(fits, f"bias must be float32 [{codes.out_features}]")
        return self._backend.pack_linear(codes, bias, few_rows or not self._copies)

    def pack_parts(self, parts: Sequence[GroupQuantizedWeight], bias: Tensor | None = None) -> PackedLinear:
        """Bring weight codes of different kinds, which share their inputs, into these kernels' order as one linear.

        Args:
            parts: codes of the outputs, in order; as few weights as possible are made of them (`join_codes`).
            bias: fp32 for the outputs of all parts, or None for 0.
        Returns: the linear for `linear`.
        Raises:
            KernelArgumentError: as `pack_linear`, or parts with different inputs.
        """
        require(len({part.in_features for part in parts}) == 1, "parts must have the same inputs")
        joined = join_codes(parts)
        widths = [part.out_features for part in joined]
        fits = bias is None or bias.shape == (sum(widths),)
        require(fits, f"bias must be float32 [{sum(widths)}]")
        biases = [None] * len(joined) if bias is None else torch.split(bias, widths)
        packed = tuple(self.pack_linear(part, own) for part, own in zip(joined, biases, strict=True))
        return packed[0] if len(packed) == 1 else PackedParts(packed)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute a base linear over packed codes.

        Semantics: x @ W^T + bias, W as `GroupQuantizedWeight.dequantize` gives it. On the CPU with Numba, activations
        are rounded first: every 32 neighbours of a row, in the order of the weight's columns, to whole multiples of a
        127th of their largest magnitude.

        Args:
            x: [T, H] contiguous.
            packed: from `pack_linear` or `pack_parts` of these ops.
        Returns: [T, O] in x's dtype; sums are fp32, and a row's result does not depend on the rows beside it, unless
            there are so many that the CPU computes them in bf16 (`cpu_ops.linear_autotune`).
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit.
        Source: group-wise scales, ggml (Gerganov) and GPTQ (Frantar et al. 2022).
        """
        self._check_activation(x, "x")
        fits = x.dim() == 2 and x.is_contiguous() and x.shape[1] == packed.in_features
        require(fits, f"x must be contiguous [T, {packed.in_features}]")
        if isinstance(packed, PackedParts):
            return self._backend.linear_parts(x, packed.parts)
        return self._backend.linear(x, packed)

    def _rotate(
        self, rows: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, plan: AttentionPlan, kv_heads: int
    ) -> Tensor:
        self._check_activation(rows, "qkv")
        check_rotated(rows, cos, sin, kv.head_dim, kv_heads)
        self._check_pages(kv, plan)
        require(plan.num_rows == len(rows), "query_lens must sum to the rows of qkv")
        return self._backend.rope_write_kv(rows, cos, sin, kv, plan.write_pages, plan.write_slots, kv_heads)

    def _check_pages(self, kv: KvPages, plan: AttentionPlan) -> None:
        check_pages(kv, plan)
        self._check_format(kv)

    def _check_format(self, kv: KvPages) -> None:
        if not self._reads(kv.format):
            raise KernelArgumentError(f"kernels {self.name!r} do not read KV pages in format {kv.format.name!r}")

    def _reads(self, kv_format: KVFormat) -> bool:
        return self._backend.kv_formats is None or kv_format.name in self._backend.kv_formats

    def _check_rows(self, x: Tensor, name: str, plan: SgmvPlan, columns: int, *, part_of_rows: bool = False) -> None:
        self._check_activation(x, name)
        if x.dim() != 2 or not (x.is_contiguous() or (part_of_rows and x.stride(1) == 1)):
            raise KernelArgumentError(f"{name} must be contiguous [T, columns]")
        if x.shape[0] != plan.num_rows:
            raise KernelArgumentError(f"{name} has {x.shape[0]} rows, the plan has {plan.num_rows}: not the same rows")
        if x.shape[1] != columns and plan.tables.num_segments:
            raise KernelArgumentError(f"{name} has {x.shape[1]} columns, the site has {columns}")
