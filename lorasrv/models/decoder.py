"""One decoder for every family: it reads a `ModelSpec` and does the sums. Rows of all requests go through together.

Base linear first, then SGMV adds each row's own adapter. Activations are fp32; T rows, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from lorasrv.batch import ForwardBatch
from lorasrv.device_memory import DeviceMemory
from lorasrv.models.rope import rope_tables
from lorasrv.models.weights import ModelWeights
from lorasrv.quant import Linear
from sgmv_kernels.ops import Ops

QKV, OUT, GATE_UP, DOWN = range(4)
"""Indices of `ModelSpec.sites()`."""


class Decoder:
    """Forward passes over paged keys and values; writes this step's own."""

    def __init__(self, weights: ModelWeights, memory: DeviceMemory, max_model_len: int, ops: Ops) -> None:
        self._weights = weights
        self._spec = weights.spec
        self._memory = memory
        self._ops = ops
        self._activation = {"silu": ops.silu_mul}[weights.spec.activation]
        rope, head_dim = weights.spec.rope, weights.spec.head_dim
        self._cos, self._sin = rope_tables(rope, head_dim, max_model_len, memory.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [rows that sample, V] fp32."""
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        x, delta = self._weights.embed(batch.token_ids), None
        for layer, weights in enumerate(self._weights.layers):
            normed = self._ops.add_rms_norm_(x, delta, weights.input_norm, self._spec.norm_eps)
            delta = self._attention(normed, layer, batch, rotation)
            normed = self._ops.add_rms_norm_(x, delta, weights.post_attn_norm, self._spec.norm_eps)
            delta = self._mlp(normed, layer, batch)
        if not batch.sampled:
            return x.new_empty((0, self._spec.vocab_size))
        last = x[batch.sample_rows]
        if delta is not None:
            delta = delta[batch.sample_rows]
        return self._weights.head(self._ops.add_rms_norm_(last, delta, self._weights.final_norm, self._spec.norm_eps))

    def _attention(self, x: Tensor, layer: int, batch: ForwardBatch, rotation: tuple[Tensor, Tensor]) -> Tensor:
        spec, weights = self._spec, self._weights.layers[layer]
        pages = self._memory.kv_pages(layer)
        qkv = self._linear(weights.qkv, x, layer, QKV, batch)
        q = self._ops.rope_write_kv(qkv, *rotation, pages, batch.attention)
        scale = spec.head_dim**-0.5
        attended = self._ops.paged_attention(q, pages, batch.attention, scale, spec.window(layer))
        return self._linear(weights.o, attended.flatten(1), layer, OUT, batch)

    def _mlp(self, x: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        weights = self._weights.layers[layer]
        gated = self._activation(self._linear(weights.gate_up, x, layer, GATE_UP, batch))
        return self._linear(weights.down, gated, layer, DOWN, batch)

    def _linear(self, linear: Linear, x: Tensor, layer: int, site: int, batch: ForwardBatch) -> Tensor:
        y = linear(x)
        self._ops.sgmv_(y, x, self._memory.slab(layer), batch.lora, layer, site)
        return y
