"""Compute as a server does: its decoder, kernels and panels of a stored adapter, over a small pool.

As in serving, rows with and without the adapter request each step; prompts come in two chunks, then token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.safetensors_file import header_cap_bytes, parse_header
from adapter_store.formats.weights import AdapterWeights, read_verified, weights_from_bytes
from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.validation.validate import validate_adapter
from lorasrv.models.loader import Checkpoint, WeightMeter
from lorasrv.models.lora_sites import adapter_layout, base_shapes
from lorasrv.offline.verify.job import VerifyJob
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.adapter_packing import pack_adapter
from lorasrv.worker.adapter_rows import own_tokens
from lorasrv.worker.base_format import choose_format, make_ops
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import ForwardBatch, build_batch
from lorasrv.worker.weights import CPU, Progress, load_weights
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.formats.kv_format import KVFormat, get_kv_format

PAGE_TOKENS = 16
WITH, WITHOUT = RequestId("with"), RequestId("without")


@dataclass(frozen=True)
class PromptLogits:
    """Hold the logits of a prompt and its greedy continuation with the adapter."""

    # The prompt, the invocation tokens of an aLoRA, and the tokens that follow them.
    tokens: tuple[int, ...]
    # First token that the adapter acts on.
    active_from: int
    # [positions, V] fp32 of the last `positions` tokens, with the adapter and without, over the same tokens.
    adapted: Tensor
    plain: Tensor


def read_adapter(job: VerifyJob, base: BaseShapes) -> AdapterWeights:
    """Read the stored weights as the store gives them to a server.

    Raises:
        AdapterError: the weights are damaged, or do not fit the base.
    """
    with job.weights.open("rb") as file:
        data = read_verified(file, job.weights_digest)
    header = parse_header(data, header_cap_bytes(base))
    spec = validate_adapter(
        job.config, header, base, job.max_lora_rank, weights_digest=job.weights_digest, stored=job.stored
    )
    if spec.key != job.key:
        raise AdapterCorrupt("the stored adapter is not what its name says; upload it again")
    return weights_from_bytes(data, header, spec)


class ServedModel:
    """Load a model as served, with one adapter in its pool; its weights stay readable as `weights`."""

    def __init__(self, job: VerifyJob, checkpoint: Checkpoint, progress: Progress) -> None:
        dtype: torch.dtype = getattr(torch, job.model.dtype)
        kv_format = get_kv_format(job.kv_dtype, job.model.dtype)
        self.ops = make_ops(job.model, checkpoint.spec, CPU)
        self.ops.warm_up(dtype, kv_format)
        self._format = choose_format(job.model, checkpoint, self.ops)
        self.weights = load_weights(checkpoint, self._format, dtype, WeightMeter(), progress)
        self.adapter = read_adapter(job, base_shapes(checkpoint.spec))
        self._key: AdapterKey = job.key
        self._dtype = dtype
        # Tokens for which the adapter has its own rows, in the head and in the embedding.
        self.own_tokens = own_tokens(self.weights, self.adapter, dtype)
        self._invocation = self.adapter.spec.invocation_tokens
        longest = max(len(prompt) for prompt in job.prompts) + len(self._invocation) + job.new_tokens
        self._pages = -(-longest // PAGE_TOKENS)
        self._memory, self._placed = self._pool(kv_format)
        limits = DecoderLimits(longest, 2 * longest, 2, dtype)
        self._decoder = Decoder(self.weights, self._memory, limits, self.ops)

    @property
    def quantization(self) -> str:
        return self._format.name

    def logits(self, prompt: Sequence[int], new_tokens: int) -> PromptLogits:
        """Compute the prompt in two chunks and `new_tokens` tokens after it, with the adapter and without in the
        same steps. The prompt of an aLoRA gets its invocation tokens.
        """
        tokens, active_from = [*prompt, *self._invocation], len(prompt) if self._invocation else 0
        cut = len(tokens) // 2
        if cut:
            self._step(tokens[:cut], 0, active_from, samples=False)
        adapted, plain = self._step(tokens[cut:], cut, active_from)
        rows = [(adapted, plain)]
        for _ in range(new_tokens):
            tokens.append(int(rows[-1][0].argmax()))
            rows.append(self._step(tokens[-1:], len(tokens) - 1, active_from))
        both = torch.stack([a for a, _ in rows]), torch.stack([p for _, p in rows])
        return PromptLogits(tuple(tokens), active_from, *both)

    @torch.inference_mode()
    def delta(self, layer: int, site: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the adapter's change of one site's output, x [T, in] fp32 -> [T, sum of the slices' widths], and the
        output to which a difference refers; zeros if the change is not computed as a difference.
        """
        plan = self._one([0] * len(x), self._key).tables.lora
        slab, plain = self._memory.slab(layer), torch.zeros(len(x), sum(self.weights.spec.sites()[site].out_features))
        if plan.tables.has_vectors:
            # A gain needs the base's own output; rounded activations would hide small errors.
            weights, at = self.weights.layers[layer], self.weights.spec.site_indices(layer).index(site)
            plain = torch.nn.functional.linear(x, weights.linears()[at].dequantize(), weights.biases[at])
        y = plain.clone()
        self.ops.sgmv_(y, x, slab, plan, layer, site)
        self.ops.affine_(y, slab, plan, layer, site)
        return y - plain, plain

    @torch.inference_mode()
    def head(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [T, V] of states [T, H] fp32, not capped, with the adapter and without; at most a page's rows.

        The base's are computed in float32: rounded activations would hide small errors.
        """
        plain = torch.nn.functional.linear(states, self.weights.head.dequantize())
        batch = self._one([0] * len(states), self._key, prompt_rows=range(len(states)))
        return self._decoder.adapted_logits(plain.clone(), states, batch), plain

    @torch.inference_mode()
    def embedding(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens [T] embedded, [T, H], with the adapter and without, before the model's factor."""
        scale = self.weights.spec.embedding_scale / self.weights.spec.residual_scale
        room = self._pages * PAGE_TOKENS
        chunks = [tokens[start : start + room] for start in range(0, len(tokens), room)]
        adapted, plain = (
            torch.cat([self._decoder.embedded(self._one(chunk, key)) for chunk in chunks]) for key in (self._key, None)
        )
        return adapted / scale, plain / scale

    def _step(
        self, tokens: Sequence[int], start: int, active_from: int, *, samples: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the [V] logits of the last token, with the adapter and without."""
        batch = self._batch(tokens, start, active_from, samples)
        logits = self._decoder.forward(batch)
        if not samples:
            return logits, logits
        by_id = {s.request_id: row.clone() for s, row in zip(batch.sampled, logits, strict=True)}
        return by_id[WITH], by_id[WITHOUT]

    def _batch(self, tokens: Sequence[int], start: int, active_from: int, samples: bool) -> ForwardBatch:
        """Lay out a step of both sequences."""

        def scheduled(request_id: RequestId, first_page: int, key: AdapterKey | None) -> ScheduledRequest:
            pages = tuple(range(first_page, first_page + self._pages))
            known = request_id, tuple(tokens), start, pages, key, samples, SamplingParams(), 0
            return ScheduledRequest(*known, active_from=active_from)

        return self._laid_out(scheduled(WITH, 0, self._key), scheduled(WITHOUT, self._pages, None))

    def _one(self, tokens: Sequence[int], key: AdapterKey | None, prompt_rows: range = range(0)) -> ForwardBatch:
        """Lay out rows of one adapter, of which only parts are computed."""
        ids, pages = tuple(tokens), tuple(range(self._pages))
        scheduled = ScheduledRequest(WITH, ids, 0, pages, key, False, SamplingParams(), 0, prompt_rows=prompt_rows)
        return self._laid_out(scheduled)

    def _laid_out(self, *requests: ScheduledRequest) -> ForwardBatch:
        step = SchedulerOutput(requests, {self._key: self._placed}, (), AdapterOrders(), 0)
        return build_batch(step, self._memory, self._dtype, self.ops)

    def _pool(self, kv_format: KVFormat) -> tuple[DevicePool, PlacedAdapter]:
        """Allocate pages for two sequences, followed by the adapter's pages."""
        spec = self.weights.spec
        layout = adapter_layout(spec, self.adapter.spec, self._dtype.itemsize, self.own_tokens)
        block = kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, PAGE_TOKENS)
        needed = layout.num_pages(block)
        memory = DevicePool(spec, 2 * self._pages + needed, PAGE_TOKENS, kv_format, CPU)
        placed = layout.place([(2 * self._pages, needed)], block)
        assert placed is not None, "one run holds what needs so many pages"
        memory.write_adapter(pack_adapter(self.weights, layout, self.adapter, self._dtype), placed)
        return memory, placed
