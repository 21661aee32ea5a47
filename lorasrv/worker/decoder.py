"""Decoder of every family: compute what a `ModelSpec` describes, rows of all requests together.

The base linear first, then SGMV adds each row's own adapter. Activations are fp32 on a CPU; T rows, H hidden, V
vocabulary.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lorasrv.models.lora_sites import (
    EMBEDDING_A,
    EMBEDDING_B,
    EMBEDDING_ROWS,
    HEAD_A,
    HEAD_B,
    HEAD_ROWS,
    VocabBlocks,
    place_widths,
    site_dims,
)
from lorasrv.models.quantization import Linear
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.exchange import Exchange, SplitOutput, empty_logits
from lorasrv.worker.forward_batch import ForwardBatch
from lorasrv.worker.rope_tables import rope_tables
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.backend import Scoring
from sgmv_kernels.forward_pass import Angles, ProgramShape, Stages, StepTables
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.ops import Ops

if TYPE_CHECKING:
    from sgmv_kernels.cpu_ops.recorded_step import PreparedPass

STATE_ROWS = 64
QKV, OUT, GATE_UP, DOWN = range(4)
"""Indices of `ModelSpec.site_indices`."""


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """Largest request and step that a decoder is built for, and the dtypes of adapters and activations."""

    max_model_len: int
    max_rows: int
    max_samples: int
    adapter_dtype: torch.dtype
    activation: torch.dtype = torch.float32


def _rows_at(table: Tensor, places: Tensor) -> Tensor:
    """Return rows [n, ...] of a table, `places` int64 [n].

    On a CPU by numpy: torch takes several times as long for a few rows, and lets other threads have Python's lock.
    """
    return table[places] if table.device.type != "cpu" else torch.from_numpy(table.numpy()[places.numpy()])


def _widened(logits: Tensor, vocab_size: int) -> Tensor:
    """Return logits [S, V] with at least `vocab_size` columns."""
    if vocab_size <= logits.shape[1]:
        return logits
    wide = logits.new_zeros((len(logits), vocab_size))
    wide[:, : logits.shape[1]] = logits
    return wide


@dataclass(slots=True)
class DecoderPass:
    """Hold a pass that was prepared."""

    batch: ForwardBatch
    # Cosines and sines of the rows' positions.
    angles: Angles
    # None: it is not recorded, but computed when its end is waited for.
    program: "PreparedPass | None"
    # Embedded tokens of such a pass.
    x: Tensor | None = None


class Decoder:
    """Forward passes over paged keys and values.

    Args:
        weights: the base model.
        memory: the pool, which holds keys, values and adapters.
        limits: the largest step.
        ops: kernels of the pool's device.
        layers: those to compute, in order; None for all.
        exchange: reaches the processes that compute other parts of each pass; None if there are none.
    """

    def __init__(
        self,
        weights: ModelWeights,
        memory: DevicePool,
        limits: DecoderLimits,
        ops: Ops,
        layers: Sequence[int] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._exchange = exchange or Exchange()
        self._computed = tuple(range(weights.spec.num_layers) if layers is None else layers)
        self._dtype = limits.activation
        self._weights = weights
        self._spec = weights.spec
        self._memory = memory
        self._ops = ops
        spec = weights.spec
        self._sites = tuple(map(spec.site_indices, range(spec.num_layers)))
        activations = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul, "gelu": ops.gelu}
        self._activation = activations[spec.activation]
        self._add_norm = {"rms": ops.add_rms_norm_, "layer": ops.add_layer_norm_}[spec.norm]
        # The residual stream is stored divided by `residual_scale`, so outputs are added to it unscaled. Norms give the
        # same result if their epsilon is scaled, too. Everything after the last norm is linear, so the weight of that
        # norm can include the division of the logits.
        self._embedding_scale = spec.embedding_scale / spec.residual_scale
        self._stream_eps = spec.norm_eps / spec.residual_scale**2
        self._final_norm = weights.final_norm / spec.logit_divisor
        slopes = spec.alibi_slopes()
        self._places = {name: i for i, name in enumerate(spec.places())}
        alibi = torch.tensor(slopes, dtype=torch.float32, device=memory.device) if slopes else None
        self._scoring = tuple(
            Scoring(spec.attention_scale, spec.window(layer), spec.attn_softcap, alibi)
            for layer in range(spec.num_layers)
        )
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        kinds = list(dict.fromkeys(ropes))
        self._rope_indices = tuple(map(kinds.index, ropes))
        # What the head read last: its addresses are in recordings and graphs, which round their rows up.
        num_states = -(-limits.max_samples // STATE_ROWS) * STATE_ROWS
        self._states = torch.zeros((num_states, spec.hidden_size), dtype=self._dtype, device=memory.device)
        # The same of a pass of more such rows.
        self._wide = self._states
        self._angles = [rope_tables(rope, spec.head_dim, limits.max_model_len, memory.device) for rope in kinds]
        # The likeliest token of each row of the last pass's logits, if it has found them.
        self._likeliest: Tensor | None = None
        self._program = ops.program(self._stages(), self._shape(limits)) if self._can_be_recorded() else None

    @property
    def weights(self) -> ModelWeights:
        """Return the base model."""
        return self._weights

    def alone(self) -> "Decoder":
        """Return a decoder of the same weights and memory that computes its part of each pass without the other
        processes, see `Exchange.alone`."""
        found = copy.copy(self)
        found._exchange = self._exchange.alone()
        return found

    @property
    def page_size(self) -> int:
        """Return the tokens of a page."""
        return self._memory.page_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a step, and write its keys and values to the pool.

        Returns: logits [rows that want them, V or more] fp32, valid until the next pass. Columns from V on are tokens
            that single adapters have beyond the base's; those of other adapters are undefined.
        """
        prepared = self.prepare(batch)
        self.begin(prepared)
        return self.complete(prepared)

    def prepare(self, batch: ForwardBatch) -> "DecoderPass":
        """Make a pass ready, for which only its tokens may be missing; another one may be computed meanwhile."""
        places = batch.positions
        angles = tuple((_rows_at(cos, places), _rows_at(sin, places)) for cos, sin in self._angles)
        if self._program is None:
            return DecoderPass(batch, angles, None)
        ids = batch.token_ids if self._program.can_embed and not batch.changes_embedding else None
        program = self._program.prepare(len(places), angles, batch.tables, ids, chooses=not batch.changes_head)
        return DecoderPass(batch, angles, program)

    @torch.inference_mode()
    def begin(self, prepared: "DecoderPass") -> None:
        """Begin with the pass that was prepared last, once that before is complete. Where it can be computed beside the
        calling thread, it is."""
        if self._program is None or prepared.program is None:
            prepared.x = self._inputs(prepared.batch)
        elif prepared.program.ids is None:
            self._program.begin(prepared.program, self._inputs(prepared.batch))
        else:
            self._check_ids(prepared.program.ids)
            self._program.begin(prepared.program)

    def take_part(self, seconds: float) -> None:
        """Compute the pass that has begun for about so long, if it is computed beside the calling thread."""
        if self._program is not None:
            self._program.take_part(seconds)

    def wait(self) -> None:
        """Wait until nothing is computed beside the calling thread: memory may be freed then."""
        if self._program is not None:
            self._program.wait()

    @torch.inference_mode()
    def settle(self) -> None:
        """Compute the layers of the pass that has begun, if one has: pages may be moved then."""
        if self._program is not None:
            self._program.settle()

    @torch.inference_mode()
    def complete(self, prepared: "DecoderPass") -> Tensor:
        """Compute the pass that has begun to its end, and return its logits, as `forward`."""
        batch = prepared.batch
        if self._program is None or prepared.program is None:
            assert prepared.x is not None, "the pass has not begun"
            logits, self._likeliest = self._layers(prepared.x, prepared.angles, batch.tables), None
        else:
            logits, self._likeliest = self._program.complete()
        self._exchange.on_pass_ended()
        if self._likeliest is not None or not (count := len(logits)):
            return logits
        states = self._states[:count] if count <= len(self._states) else self._wide
        return self._capped(self.adapted_logits(logits, states, batch))

    @torch.inference_mode()
    def adapted_logits(self, logits: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        """Apply what the rows' adapters change of the head.

        Args:
            logits: [S, V] fp32 of the base, not capped; written.
            states: normed last hidden states [S, H].
        Returns: [S, V or more], see `forward`.
        """
        if (own := batch.head_rows) is not None:
            logits = _widened(logits, own.vocab_size)
            self._ops.own_logits_(logits, states, self._memory.slabs, own.plan, HEAD_ROWS, own.tokens)
        if batch.head is not None:
            self._add_heads_(logits, states, batch.head)
        return logits

    @property
    def states(self) -> Tensor:
        """Return the normed last hidden states of the last pass's rows that want logits.

        Returns: [at least `max_samples`, H], valid until the next pass; not written by a pass of more such rows.
        """
        divisor = self._spec.logit_divisor
        return self._states if divisor == 1 else self._states * divisor

    @property
    def likeliest(self) -> Tensor | None:
        """Return the likeliest token of each row of the last pass's logits, as `Ops.likeliest` finds it; None if the
        pass has not looked for them.

        Returns: [S] int64, valid until the next pass.
        """
        return self._likeliest

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [N, V] fp32 of normed last hidden states [N, H]."""
        divisor = self._spec.logit_divisor
        return self._capped(self._weights.head(states if divisor == 1 else states / divisor).float())

    @property
    def num_threads(self) -> int:
        """Return the threads that compute a pass that has begun; 1 where the calling one computes it when it waits for
        its end."""
        return 1 if self._program is None else self._program.num_threads

    @property
    def ended_s(self) -> float:
        """Return when the pass was complete that `complete` has just returned, by `time.perf_counter`: earlier than
        that, if others computed it alone."""
        return time.perf_counter() if self._program is None else self._program.ended_s

    def kernel_seconds(self) -> Mapping[str, float]:
        """Return the seconds of the last pass by kind of kernel; empty where the pass was not recorded."""
        return {} if self._program is None else self._program.seconds()

    def _can_be_recorded(self) -> bool:
        return self._ops.can_record and self._weights.is_recordable and self._exchange.can_record

    def _stages(self) -> Stages:
        can_embed = self._weights.embed.can_be_recorded and self._embedding_scale == 1
        return Stages(
            embed=self._weights.embed if can_embed else None,
            layers=self._layers,
            choose=lambda logits: self._ops.likeliest(self._capped(logits)),
        )

    def _shape(self, limits: DecoderLimits) -> ProgramShape:
        spec = self._spec
        return ProgramShape(
            max_rows=limits.max_rows,
            max_samples=limits.max_samples,
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            angles=tuple(cos.shape[1] for cos, _ in self._angles),
            page_size=self._memory.page_size,
            num_pages=self._memory.num_pages,
            num_layers=spec.num_layers,
            sites=site_dims(spec),
            adapter_dtype=limits.adapter_dtype,
            places=place_widths(spec),
        )

    def _check_ids(self, ids: Tensor) -> None:
        """Raise IndexError for an id that is no token's; a negative one is a very large one."""
        if ids.numpy().view(np.uint64).max(initial=0) >= self._spec.vocab_size:
            raise IndexError(f"token ids must be from 0 to {self._spec.vocab_size - 1}")

    def _inputs(self, batch: ForwardBatch) -> Tensor:
        """Return the inputs [T, H] of the first layer that is computed here."""
        return self.embedded(batch) if self._exchange.is_first else self._exchange.arrive(len(batch.token_ids))

    @torch.inference_mode()
    def embedded(self, batch: ForwardBatch) -> Tensor:
        """Return embedded tokens [T, H], with what the rows' adapters change of them."""
        replaced, ids = batch.embedding_rows, batch.token_ids
        if replaced is not None and replaced.vocab_size > self._spec.vocab_size:
            # Rows of tokens that the base lacks are all replaced.
            ids = ids.clamp(max=self._spec.vocab_size - 1)
        x = self._weights.embed(ids).to(self._dtype)
        if replaced is not None:
            plan, tokens = replaced.plan, replaced.tokens
            self._ops.own_embeddings_(x, batch.token_ids, self._memory.slabs, plan, EMBEDDING_ROWS, tokens)
        if batch.embedding is not None:
            # Before the scale, which is part of the module that PEFT adapts.
            slabs, plan, blocks = self._memory.slabs, batch.embedding, VocabBlocks.of(self._spec)
            firsts = [blocks.start(i) for i in range(blocks.count)]
            for own in plan.passes():
                v = self._ops.columns(batch.token_ids, slabs, own, EMBEDDING_A, firsts)
                self._ops.expand_(x, v, slabs[0], own, 0, EMBEDDING_B)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _layers(self, x: Tensor, angles: Angles, tables: StepTables) -> Tensor:
        """Compute logits, not capped, from embedded tokens [T, H] by calls of `ops` and of linears, and no other
        arithmetic where a pass is recorded.
        """
        delta = None
        for layer in self._computed:
            weights = self._weights.layers[layer]
            normed = self._norm(x, delta, weights.input_norm, layer, "input_norm", tables)
            delta = self._attention(normed, layer, tables, angles[self._rope_indices[layer]])
            delta = self._out_norm(delta, weights.attn_out_norm, layer, "attn_out_norm", tables)
            normed = self._norm(x, delta, weights.post_attn_norm, layer, "post_attn_norm", tables)
            delta = self._mlp(normed, layer, tables)
            delta = self._out_norm(delta, weights.mlp_out_norm, layer, "mlp_out_norm", tables)
        count = len(tables.sample_rows)
        if not self._exchange.is_last:
            assert delta is not None
            self._exchange.leave(x.add_(delta))
            return self._exchange.logits(None, count)
        if not self._exchange.has_states(count):
            return empty_logits(self._spec.vocab_size, x.device)
        last = self._spec.num_layers - 1
        normed = self._norm(x, delta, self._final_norm, last, "final_norm", tables)
        states = self._last_states(normed, tables.sample_rows)
        if not len(states):
            return empty_logits(self._spec.vocab_size, x.device)
        return self._exchange.logits(self._weights.head(states).float(), len(states))

    def _last_states(self, normed: Tensor, rows: Tensor) -> Tensor:
        """Return the rows that want logits, where adapters of the head and drafters find them."""
        own = self._ops.take_rows(normed, rows, self._room(len(rows))) if len(rows) else normed[:0]
        states = self._exchange.states(own)
        return states if states is own else self._room(len(states)).copy_(states)

    def _room(self, count: int) -> Tensor:
        if count <= len(self._states):
            return self._states[:count]
        self._wide = self._states.new_empty((count, self._states.shape[1]))
        return self._wide

    def _add_heads_(self, logits: Tensor, states: Tensor, plan: SgmvPlan) -> None:
        """Add the deltas of adapters of the head to logits [S, V], block by block of the vocabulary."""
        blocks = VocabBlocks.of(self._spec)
        for own in plan.passes():
            v = self._ops.shrink(states, self._memory.slabs[0], own, 0, HEAD_A)
            for i, slab in enumerate(self._memory.slabs):
                columns = logits[:, blocks.start(i) : blocks.start(i) + blocks.width]
                self._ops.expand_(columns, v, slab, own, i, HEAD_B)

    def _capped(self, logits: Tensor) -> Tensor:
        if self._spec.final_softcap is not None and len(logits):
            self._ops.softcap_(logits, self._spec.final_softcap)
        return logits

    def _norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, layer: int, place: str, tables: StepTables
    ) -> Tensor:
        """Add `delta` [T, H] to x in place, and return the normed sum, with the weights of each row's adapter; or x
        itself if the model has no norm there.
        """
        if weight is None:
            if delta is not None:
                self._ops.add_(x, delta)
            return x
        normed = self._add_norm(x, delta, weight, self._stream_eps)
        self._affine_(normed, layer, self._places[place], tables)
        return normed

    def _out_norm(self, delta: Tensor, weight: Tensor | None, layer: int, place: str, tables: StepTables) -> Tensor:
        """Return the normed output [T, H] of attention or MLP; `delta` itself if the model has no norm there."""
        if weight is None:
            return delta
        normed = self._add_norm(delta, None, weight, self._spec.norm_eps)
        self._affine_(normed, layer, self._places[place], tables)
        return normed

    def _affine_(self, y: Tensor, layer: int, place: int, tables: StepTables) -> None:
        """Apply the gains and shifts of the rows' adapters; a step pays nothing where none has any."""
        if tables.lora.tables.has_vectors:
            self._ops.affine_(y, self._memory.slab(layer), tables.lora, layer, place)

    def _attention(self, x: Tensor, layer: int, tables: StepTables, rotation: tuple[Tensor, Tensor]) -> Tensor:
        spec, weights = self._spec, self._weights.layers[layer]
        pages = self._memory.kv_pages(layer)
        qkv = self._linear(weights.qkv, x, layer, QKV, tables)
        has_own_kv = spec.has_own_kv(layer)
        if weights.q_norm is not None:
            k_norm = weights.q_norm if weights.k_norm is None else weights.k_norm
            normed_keys = spec.kv_width // len(k_norm) if has_own_kv else 0
            self._ops.norm_heads_(qkv, weights.q_norm, k_norm, normed_keys, spec.norm_eps)
            self._affine_(qkv, layer, self._places["qk_norm" if has_own_kv else "q_norm"], tables)
        rotate = self._ops.rope_write_kv if has_own_kv else self._ops.rope_queries
        rows, written = self._exchange.all_rows(qkv, tables.attention)
        q = self._exchange.own_rows(rotate(rows, *rotation, pages, written))
        attended = self._ops.paged_attention(q, pages, tables.attention, self._scoring[layer], tables.masses)
        read = self._exchange.whole(attended.flatten(1), SplitOutput.ATTENDED)
        return self._exchange.whole(self._linear(weights.o, read, layer, OUT, tables), SplitOutput.OUT)

    def _mlp(self, x: Tensor, layer: int, tables: StepTables) -> Tensor:
        weights = self._weights.layers[layer]
        gated = self._activation(self._linear(weights.gate_up, x, layer, GATE_UP, tables))
        read = self._exchange.whole(gated, SplitOutput.GATED)
        return self._exchange.whole(self._linear(weights.down, read, layer, DOWN, tables), SplitOutput.DOWN)

    def _linear(self, linear: Linear, x: Tensor, layer: int, place: int, tables: StepTables) -> Tensor:
        slab, site = self._memory.slab(layer), self._sites[layer][place]
        y = linear(x)
        self._ops.sgmv_(y, x, slab, tables.lora, layer, site)
        self._affine_(y, layer, site, tables)
        return y
