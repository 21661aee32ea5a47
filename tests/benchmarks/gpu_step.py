"""Time the decode step of Llama-3-8B's shape with random weights, with and without adapters, beside lower bounds.

Floors are the bytes that a step must read and write at least over the bandwidth of a copy.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_cases import FORMATS, GROUP, event_ms, group_of, random_codes

from lorasrv.models.lora_sites import site_dims
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import SHAPES, ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.cuda_graphs import CudaGraph, GraphedSteps, Recorded
from lorasrv.worker.cuda_streams import SideStream
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.weights import LayerWeights, ModelWeights
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops, PackedLinear

SPEC = SHAPES["llama-3-8b"]
# (rows, distinct adapters)
WORK = ((1, 1), (32, 8), (32, 32), (128, 128))
RANK, CONTEXT, PAGE, MAX_LEN = 16, 512, 16, 2048
REPEATS = 20
STD = 0.02


class PackedBase:
    """A quantized linear (`lorasrv.models.quantization.Linear`) of random values."""

    def __init__(self, ops: Ops, packed: PackedLinear) -> None:
        self._ops, self._packed = ops, packed
        self.in_features, self.out_features, self.nbytes = packed.in_features, packed.out_features, packed.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(x, self._packed)

    def dequantize(self) -> torch.Tensor:
        return self._packed.dequantize()


def random_weights(spec: ModelSpec, ops: Ops, quantization: str, dtype: torch.dtype) -> ModelWeights:
    """Make random weights as a server holds them: embedding and head are int8 unless nothing is quantized."""

    def floats(out: int, width: int) -> torch.Tensor:
        return torch.empty(out, width, dtype=dtype, device=ops.device).normal_(std=STD)

    def linear(out: int, width: int, quantization: str = quantization) -> FloatLinear | PackedBase:
        if quantization == "bf16":
            return FloatLinear(floats(out, width), None)
        levels = FORMATS[quantization]
        return PackedBase(ops, ops.pack_linear(random_codes(out, width, levels, ops.device, group_of(levels, GROUP))))

    def layer() -> LayerWeights:
        norm = torch.ones(spec.hidden_size, device=ops.device)
        sites = [linear(sum(site.out_features), site.in_features) for site in spec.sites()]
        return LayerWeights(norm, norm, *sites)

    layers = tuple(layer() for _ in range(spec.num_layers))
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
        side: SideStream | None,
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
        decoder = Decoder(weights, self.memory, limits, ops, side)

        def remember(compute: Callable[[], torch.Tensor]) -> Recorded:
            self.recorded = record(compute)
            return self.recorded

        self.steps = GraphedSteps(decoder.forward, spec, self.memory, limits, remember)

    def step(self, adapters: int) -> SchedulerOutput:
        keys = [f"a{i:03}" for i in range(adapters)]
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


@dataclass(frozen=True)
class Took:
    """Milliseconds of a step on the device, and with the host's work."""

    device: float
    whole: float


def measure(case: StepCase, adapters: int) -> Took:
    step = case.step(adapters)
    for _ in range(3):
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


def time_steps(ops: Ops, bandwidth: float, quick: bool) -> list[list[str]]:
    """Return rows of `COLUMNS`."""
    table, pool = [], torch.cuda.graph_pool_handle()
    for quantization in ("int4", "bf16") if quick else ("bf16", "int8", "int4", "q3h"):
        weights = random_weights(SPEC, ops, quantization, torch.bfloat16)
        for rows, adapters in WORK[:2] if quick else WORK:
            side = SideStream(ops.device)
            args = (ops, rows, adapters, torch.bfloat16, lambda compute: CudaGraph(compute, pool))
            case = StepCase(weights, *args, side)
            base, lora = measure(case, 0), measure(case, adapters)
            del case
            torch.cuda.empty_cache()
            case = StepCase(weights, *args, None)
            one_stream = measure(case, adapters)
            floors = case.base_bytes() / bandwidth * 1e3, case.lora_bytes(adapters, 2) / bandwidth * 1e3
            cells = [base.device, floors[0], lora.device, one_stream.device, floors[1], base.whole, lora.whole]
            over = f"{lora.device / base.device - 1:.1%} ({floors[1] / floors[0]:.1%})"
            table.append([quantization, f"{rows}/{adapters}", *(f"{ms:.3f}" for ms in cells), over])
            print(*table[-1], flush=True)
            del case
            torch.cuda.empty_cache()
        del weights
    return table


COLUMNS = (
    "base",
    "rows/adapters",
    "base ms",
    "floor ms",
    "with adapters ms",
    "in one stream ms",
    "adapters' floor ms",
    "base with host ms",
    "adapters with host ms",
    "overhead (of floors)",
)
