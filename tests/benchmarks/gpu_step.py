"""Time the decode step of Llama-3-8B's shape with random weights, with and without adapters, beside lower bounds.

    python tests/benchmarks/gpu_step.py        # rows as lines of JSON; docs/gpu.md

Floors are the bytes that a step must read and write at least over the bandwidth of a copy. Where the device has a table
of block sizes of its own, the steps are timed with the built-in one too.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from gpu_cases import DRY_RUN, FORMATS, GROUP, copy_bandwidth, emit, event_ms, group_of, need_gpu, random_codes

from adapter_store.spec import AdapterKey
from lorasrv.models.lora_sites import site_dims
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import SHAPES, ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.cuda_graphs import GraphedSteps, Recorded, cuda_recorder
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.graph_memory import GRAPH_BYTES, pass_bytes
from lorasrv.worker.weights import LayerWeights, ModelWeights
from sgmv_kernels.backend import PackedLinear
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import block_sizes

SPEC = ModelSpec("llama", 1, 128, 256, 4, 2, 32, 256, 2048, 1e-5) if DRY_RUN else SHAPES["llama-3-8b"]
# (rows, distinct adapters)
WORK = ((2, 2),) if DRY_RUN else ((1, 1), (32, 8), (32, 32), (128, 128))
QUANTIZATIONS = ("int4", "int8", "bf16", "q3h")
RANK, CONTEXT, PAGE, MAX_LEN = 16, 20 if DRY_RUN else 512, 16, 2048
REPEATS = 1 if DRY_RUN else 20
STD = 0.02


class PackedBase:
    """A quantized linear (`lorasrv.models.quantization.Linear`) of random values."""

    def __init__(self, ops: Ops, packed: PackedLinear) -> None:
        self._ops, self._packed = ops, packed
        self.in_features, self.out_features, self.nbytes = packed.in_features, packed.out_features, packed.nbytes
        self.can_be_recorded = ops.can_record

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(x, self._packed)

    def dequantize(self) -> torch.Tensor:
        return self._packed.dequantize()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._packed.rows(ids)


def random_weights(spec: ModelSpec, ops: Ops, quantization: str, dtype: torch.dtype) -> ModelWeights:
    """Make random weights as a server holds them: embedding and head are int8 unless nothing is quantized."""

    def floats(out: int, width: int) -> torch.Tensor:
        return torch.empty(out, width, dtype=dtype, device=ops.device).normal_(std=STD)

    def linear(out: int, width: int, quantization: str = quantization) -> FloatLinear | PackedBase:
        if quantization == "bf16":
            return FloatLinear(floats(out, width), None)
        levels = FORMATS[quantization]
        return PackedBase(ops, ops.pack_linear(random_codes(out, width, levels, ops.device, group_of(levels, GROUP))))

    def layer(index: int) -> LayerWeights:
        qkv, o, gate_up, down = (linear(sum(site.out_features), site.in_features) for site in spec.sites_of(index))
        norms: dict[str, Any] = {
            name: torch.ones(width, device=ops.device) for name, (_, width) in spec.norms(index).items()
        }
        return LayerWeights(qkv, o, gate_up, down, **norms)

    layers = tuple(map(layer, range(spec.num_layers)))
    head = linear(spec.vocab_size, spec.hidden_size, "bf16" if quantization == "bf16" else "int8")
    embed = FloatEmbedding(floats(spec.vocab_size, spec.hidden_size))
    return ModelWeights(spec, embed, layers, torch.ones(spec.hidden_size, device=ops.device), head, "random")


class StepCase:
    """A decoder over a pool that holds keys for `rows` sequences of `context` tokens and `adapters` adapters."""

    def __init__(
        self,
        weights: ModelWeights,
        ops: Ops,
        rows: int,
        adapters: int,
        dtype: torch.dtype,
        record: Callable[[Callable[[], torch.Tensor]], Recorded],
        context: int = CONTEXT,
    ) -> None:
        spec, self.weights = weights.spec, weights
        per_row = -(-(context + 1) // PAGE)
        ranks = tuple(tuple(RANK for _ in site.out_features) for site in spec.sites())
        layout = AdapterLayout(site_dims(spec), (ranks,) * spec.num_layers, dtype.itemsize)
        kv_format = KV_FORMATS[str(dtype).removeprefix("torch.")]
        page_bytes = kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, PAGE)
        per_adapter = layout.num_pages(page_bytes)
        pages = rows * per_row + adapters * per_adapter
        self.memory = DevicePool(spec, pages, PAGE, kv_format, ops.device, scratch=True)
        for layer in range(spec.num_layers):
            self.memory.slab(layer).view(dtype).normal_(std=STD)
        self.placed: list[PlacedAdapter] = []
        for i in range(adapters):
            placed = layout.place([(rows * per_row + i * per_adapter, per_adapter)], page_bytes)
            assert placed is not None
            self.placed.append(placed)
        self.rows, self.context, self.per_row = rows, context, per_row
        self.recorded: Recorded | None = None
        limits = DecoderLimits(MAX_LEN, rows, rows, dtype, dtype)
        decoder = Decoder(weights, self.memory, limits, ops)

        def remember(compute: Callable[[], torch.Tensor]) -> Recorded:
            self.recorded = record(compute)
            return self.recorded

        self.steps = GraphedSteps(decoder.forward, spec, self.memory, limits, remember)

    def step(self, adapters: int) -> SchedulerOutput:
        keys = [AdapterKey(f"a{i:03}") for i in range(adapters)]
        scheduled = tuple(
            ScheduledRequest(
                RequestId(str(i)),
                (i % 1000,),
                self.context,
                tuple(range(i * self.per_row, (i + 1) * self.per_row)),
                keys[i % adapters] if adapters else None,
                True,
                SamplingParams(),
                0,
            )
            for i in range(self.rows)
        )
        used = dict(zip(keys, self.placed, strict=False))
        return SchedulerOutput(scheduled, used, (), AdapterOrders(), 0)

    def base_bytes(self) -> int:
        """Return the bytes of all weights but the embedding, keys and values."""
        spec, weights = self.weights.spec, self.weights
        linears = sum(linear.nbytes for layer in weights.layers for linear in layer.linears()) + weights.head.nbytes
        return linears + self.rows * self.context * self.memory.page_bytes // PAGE * spec.num_layers

    def lora_bytes(self, adapters: int, itemsize: int) -> int:
        """Return the bytes of panels, inputs read once more, outputs read and written."""
        dims = site_dims(self.weights.spec)
        panels = RANK * sum(site.in_features * len(site.out_features) + site.total_out for site in dims)
        rows = sum(site.in_features + 2 * site.total_out for site in dims)
        return itemsize * self.weights.spec.num_layers * (adapters * panels + self.rows * rows)

    def planned_mb(self) -> float:
        """Return the memory that a plan counts for the graphs so far."""
        held, itemsize = self.steps._buckets, torch.bfloat16.itemsize
        largest = max(pass_bytes(self.weights.spec, self.steps.dims, capacity, itemsize) for capacity in held)
        return (largest + sum(bucket.plans.nbytes for bucket in held.values()) + len(held) * GRAPH_BYTES) / 1e6


def free_mb() -> float:
    """Return the free memory of the device; 0 without one."""
    if DRY_RUN:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 1e6


@dataclass(frozen=True)
class Took:
    """Milliseconds of a step on the device, and with the host's work."""

    device: float
    whole: float


def measure(case: StepCase, adapters: int) -> Took:
    step = case.step(adapters)
    for _ in range(1 if DRY_RUN else 3):
        assert case.steps.compute(step) is not None
    assert case.recorded is not None
    device, whole = event_ms(case.recorded.replay, REPEATS), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        made = case.steps.compute(step)
        assert made is not None
        made[0].argmax(dim=-1).tolist()
        whole.append(1e3 * (time.perf_counter() - started))
    return Took(statistics.median(device), statistics.median(whole))


class Computed:
    """Stand in for a captured graph without a GPU: a replay computes."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute, self.output = compute, compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())


@contextmanager
def built_in_table() -> Iterator[None]:
    """Take the built-in table of block sizes, whatever the device has."""
    caches: list[Any] = [block_sizes.rows_config, block_sizes.sgmv_config, block_sizes.attention_config]
    caches += [block_sizes.linear_config, block_sizes.dequantize_above]
    built_in = block_sizes.table_of(block_sizes.DEFAULT)
    with mock.patch.object(block_sizes, "table_of", return_value=built_in):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def time_steps(ops: Ops, bandwidth: float, table: str) -> None:
    record = Computed if DRY_RUN else cuda_recorder()
    for quantization in QUANTIZATIONS[:1] if DRY_RUN else QUANTIZATIONS:
        weights = random_weights(SPEC, ops, quantization, torch.bfloat16)
        for rows, adapters in WORK:
            case = StepCase(weights, ops, rows, adapters, torch.bfloat16, record)
            free = free_mb()
            base, lora = measure(case, 0), measure(case, adapters)
            graphs_mb, planned_mb = free - free_mb(), case.planned_mb()
            floors = case.base_bytes() / bandwidth * 1e3, case.lora_bytes(adapters, 2) / bandwidth * 1e3
            del case
            # Graphs and what they compute hold each other.
            gc.collect()
            emit(
                f"decode step, {CONTEXT} keys a row, rank {RANK}, in a graph",
                tiles=table,
                base=quantization,
                rows=rows,
                adapters=adapters,
                base_ms=base.device,
                floor_ms=floors[0],
                with_adapters_ms=lora.device,
                adapters_floor_ms=floors[1],
                base_with_host_ms=base.whole,
                adapters_with_host_ms=lora.whole,
                graphs_mb=graphs_mb,
                graphs_planned_mb=planned_mb,
                overhead=lora.device / base.device - 1,
                overhead_of_floors=floors[1] / floors[0],
            )
            torch.cuda.empty_cache()
        del weights


def main() -> None:
    device = need_gpu()
    torch.manual_seed(0)
    ops, bandwidth = Ops(device, "triton"), copy_bandwidth(device)
    if block_sizes.table_of(block_sizes.device_name(device))["measured"]:
        time_steps(ops, bandwidth, "tuned")
    with built_in_table():
        time_steps(ops, bandwidth, "built in")


if __name__ == "__main__":
    main()
