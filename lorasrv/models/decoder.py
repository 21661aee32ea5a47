"""One decoder for every family: it reads a `ModelSpec` and does the sums. Rows of all requests go through together.

Base linear first, then SGMV adds each row's own adapter. Activations are fp32; T rows, H hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lorasrv.batch import ForwardBatch
from lorasrv.device_memory import DeviceMemory
from lorasrv.models.rope import rope_tables
from lorasrv.models.weights import ModelWeights
from lorasrv.quant import Linear
from sgmv_kernels import ops

QKV, OUT, GATE_UP, DOWN = range(4)
"""Indices of `ModelSpec.sites()`."""

GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": ops.silu_mul}


class Decoder:
    """Forward passes over paged keys and values; writes this step's own."""

    def __init__(self, weights: ModelWeights, memory: DeviceMemory, max_model_len: int) -> None:
        self._weights = weights
        self._spec = weights.spec
        self._memory = memory
        self._activation = GATED_ACTIVATIONS[weights.spec.activation]
        rope, head_dim = weights.spec.rope, weights.spec.head_dim
        self._cos, self._sin = rope_tables(rope, head_dim, max_model_len, memory.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [rows that sample, V] fp32."""
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        x = self._weights.embed(batch.token_ids)
        for layer in range(self._spec.num_layers):
            x = x + self._attention(x, layer, batch, rotation)
            x = x + self._mlp(x, layer, batch)
        if not batch.sampled:
            return x.new_empty((0, self._spec.vocab_size))
        x = ops.rms_norm(x[batch.sample_rows], self._weights.final_norm, self._spec.norm_eps)
        return self._weights.head(x)

    def _attention(self, x: Tensor, layer: int, batch: ForwardBatch, rotation: tuple[Tensor, Tensor]) -> Tensor:
        spec, weights = self._spec, self._weights.layers[layer]
        x = ops.rms_norm(x, weights.input_norm, spec.norm_eps)
        qkv = self._linear(weights.qkv, x, layer, QKV, batch)
        q, k, v = torch.split(qkv, [spec.q_width, spec.kv_width, spec.kv_width], dim=-1)
        q, k, v = (t.view(len(t), -1, spec.head_dim) for t in (q, k, v))
        q, k = ops.rope_(q, *rotation), ops.rope_(k, *rotation)
        pages = self._memory.kv_pages(layer)
        ops.write_kv(k, v, pages, batch.kv_pages, batch.kv_slots)
        scale = spec.head_dim**-0.5
        attended = ops.paged_attention(q.contiguous(), pages, batch.attention, scale, spec.window(layer))
        return self._linear(weights.o, attended.flatten(1), layer, OUT, batch)

    def _mlp(self, x: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        weights = self._weights.layers[layer]
        x = ops.rms_norm(x, weights.post_attn_norm, self._spec.norm_eps)
        gated = self._activation(self._linear(weights.gate_up, x, layer, GATE_UP, batch))
        return self._linear(weights.down, gated, layer, DOWN, batch)

    def _linear(self, linear: Linear, x: Tensor, layer: int, site: int, batch: ForwardBatch) -> Tensor:
        y = linear(x)
        ops.sgmv(y, x, self._memory.slab(layer), batch.lora, layer, site)
        return y
