"""Time the CPU kernels and their memory throughput, beside the plain torch path and PEFT's loop, in one process.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py --rows 1,16,32,64

Shapes are SmolLM2-135M's, adapters of rank 16 on all seven linears in bf16. "Share" is of the read bandwidth that the
same threads reach in the same run, over bytes that each workload must read once: panels of distinct adapters, or keys
and values. Each figure is the least of several rounds; the bandwidth is the better of two, measured before and after.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from harness import arguments, row, table

from sgmv_kernels.cpu_runtime import openmp
from sgmv_kernels.cpu_runtime.kernel_cache import address_of
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import AttentionPlan, Ops

SITES = (SiteDims(576, (576, 192, 192)), SiteDims(576, (576,)), SiteDims(576, (1536, 1536)), SiteDims(1536, (576,)))
LAYERS, RANK, PAGE_BYTES = 30, 16, 12288
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
CPU = torch.device("cpu")
CHUNK = 1 << 20
# Workloads walk over so many bytes before they come back to the first: far more than a cache holds.
COLD_BYTES = 256 << 20
# (sequences, keys, queries of each, softcap)
ATTENTION = (
    (1, 512, 1, None),
    (16, 512, 1, None),
    (16, 512, 1, 50.0),
    (32, 128, 1, None),
    (4, 2048, 1, None),
    (1, 8192, 1, None),
    (1, 512, 512, None),
)


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Return the bytes a second of reading a buffer front to back with all threads."""
    kernel = address_of("bandwidth", "read")
    chunks = buffer.numel() // CHUNK
    args = openmp.arguments(chunks, buffer.data_ptr(), CHUNK, 0)
    return chunks * CHUNK / least(lambda: openmp.run(kernel, args, openmp.team_size(), chunks), rounds=9)


def least(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@dataclass
class Panels:
    """Adapters of one rank in a pool of their own."""

    slabs: torch.Tensor
    placed: list[PlacedAdapter]

    @classmethod
    def make(cls, count: int) -> "Panels":
        layout = AdapterLayout(SITES, (((RANK,) * 3, (RANK,), (RANK,) * 2, (RANK,)),) * LAYERS, 2)
        pages = layout.num_pages(PAGE_BYTES)
        slabs = torch.empty((LAYERS, count * pages * PAGE_BYTES), dtype=torch.uint8)
        for slab in slabs:
            slab.view(torch.bfloat16).normal_(0, 0.02)
        placed = [layout.place([(i * pages, pages)], PAGE_BYTES) for i in range(count)]
        return cls(slabs, [p for p in placed if p is not None])

    @property
    def adapter_bytes(self) -> int:
        return LAYERS * self.placed[0].layout.layer_bytes


def adapters_of(popularity: str, rows: int, adapters: int) -> np.ndarray:
    """Return the adapter of every row, by Punica's popularity distributions."""
    if popularity == "distinct":
        return np.arange(rows) % adapters
    if popularity == "identical":
        return np.zeros(rows, dtype=np.int64)
    rng = np.random.default_rng(1)
    weights = np.ones(adapters) if popularity == "uniform" else (1 + np.arange(adapters)) ** -1.5
    return rng.choice(adapters, rows, p=weights / weights.sum())


def sgmv_seconds(ops: Ops, panels: Panels, row_adapters: np.ndarray, rounds: int) -> float:
    """Return the time of one step's deltas, all layers and sites, planning included."""
    rows = len(row_adapters)
    segments = build_segments(row_adapters.astype(np.int32))
    xs = [torch.randn(rows, dims.in_features) for dims in SITES]
    ys = [torch.zeros(rows, dims.total_out) for dims in SITES]
    slabs = list(panels.slabs)

    def step() -> None:
        plan = ops.plan_sgmv(segments, panels.placed, torch.bfloat16)
        for layer, slab in enumerate(slabs):
            for site in range(len(SITES)):
                ops.sgmv_(ys[site], xs[site], slab, plan, layer, site)

    step()
    return least(step, rounds)


def peft_seconds(row_adapters: np.ndarray, rounds: int) -> float:
    """Return the time of PEFT's loop over the adapters of a batch, without its base linears: one layer, times 30."""
    from peft import LoraConfig, get_peft_model

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, dims in enumerate(SITES):
                for j, out in enumerate(dims.out_features):
                    setattr(self, f"linear{i}{j}", torch.nn.Linear(dims.in_features, out, bias=False))

        def forward(self, xs: Sequence[torch.Tensor]) -> None:
            for i, dims in enumerate(SITES):
                for j in range(len(dims.out_features)):
                    getattr(self, f"linear{i}{j}")(xs[i])

    names = [f"a{i}" for i in row_adapters]
    config = LoraConfig(r=RANK, target_modules=r"linear\d\d", init_lora_weights=False)
    bare = Layer().eval()
    xs = [torch.randn(len(names), dims.in_features) for dims in SITES]
    with torch.inference_mode():
        bare(xs)
        base = least(lambda: bare(xs), rounds)
    model = get_peft_model(bare, config, adapter_name=names[0]).eval()
    for name in dict.fromkeys(names[1:]):
        if name != names[0]:
            model.add_adapter(name, config)
    with torch.inference_mode():
        model(xs, adapter_names=names)
        return LAYERS * (least(lambda: model(xs, adapter_names=names), rounds) - base)


def attention_case(sequences: int, length: int) -> tuple[list[KvPages], np.ndarray]:
    """Return layers of cold pages, and page tables in random order."""
    pages = -(-length // PAGE) * sequences
    kv_format = KV_FORMATS["bfloat16"]
    slab_bytes = pages * kv_format.page_bytes(KV_HEADS, DIM, PAGE)
    layers = [
        KvPages(torch.randn(slab_bytes // 2).to(torch.bfloat16).view(torch.uint8), kv_format, KV_HEADS, PAGE, DIM)
        for _ in range(max(2, min(64, COLD_BYTES // slab_bytes)))
    ]
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    return layers, order.reshape(sequences, -1)


def attention_seconds(
    ops: Ops, case: tuple[list[KvPages], np.ndarray], queries: int, length: int, softcap: float | None = None
) -> float:
    """Return the time of one layer without planning, which a step does once for all layers."""
    layers, tables = case
    q = torch.randn(len(tables) * queries, HEADS, DIM)
    lens = [length] * len(tables)
    plan = ops.plan_attention(tables, [queries] * len(tables), lens, PAGE, layers[0].num_pages)

    def work() -> None:
        for kv in layers:
            ops.paged_attention(q, kv, plan, DIM**-0.5, softcap=softcap)

    work()
    return least(work, 5) / len(layers)


def pointwise(ops: Ops, plain: Ops, rows: int) -> list[tuple[str, float, float]]:
    """Return (op, seconds of the kernels, seconds of torch)."""
    x, delta, weight = torch.randn(rows, 576), torch.zeros(rows, 576), torch.ones(576)
    norm, logits = torch.ones(DIM), torch.randn(rows, 49152)
    gate_up, qkv = torch.randn(rows, 3072), torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
    cos, sin = torch.rand(rows, DIM // 2), torch.rand(rows, DIM // 2)
    layers, _ = attention_case(4, 1024)
    tables = np.arange(rows, dtype=np.int32)[:, None] % layers[0].num_pages

    def plan(o: Ops) -> AttentionPlan:
        return o.plan_attention(tables, [1] * rows, [7] * rows, PAGE, layers[0].num_pages)

    plans = {id(o): plan(o) for o in (ops, plain)}
    works: list[tuple[str, Callable[[Ops], object]]] = [
        ("add_rms_norm_", lambda o: o.add_rms_norm_(x, delta, weight, 1e-5)),
        ("silu_mul", lambda o: o.silu_mul(gate_up)),
        ("gelu_mul", lambda o: o.gelu_mul(gate_up)),
        ("norm_heads_", lambda o: o.norm_heads_(qkv, norm, norm, KV_HEADS, 1e-5)),
        ("softcap_ (logits)", lambda o: o.softcap_(logits, 30.0)),
        ("rope_write_kv", lambda o: o.rope_write_kv(qkv, cos, sin, layers[0], plans[id(o)])),
    ]

    def seconds(work: Callable[[Ops], object], o: Ops) -> float:
        return least(lambda: [work(o) for _ in range(50)], 7) / 50

    return [(name, seconds(work, ops), seconds(work, plain)) for name, work in works]


def main() -> None:
    a = arguments(
        __doc__,
        rows=((1, 4, 16, 32, 64), "of SGMV"),
        threads=(torch.get_num_threads(), "that compute"),
    )
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    ops, plain = Ops(CPU), Ops(CPU, "torch")
    panels = Panels.make(max(a.rows))
    bandwidths = [read_bandwidth(panels.slabs.view(-1))]
    found: list[tuple[str, str, float, int, float, float | None]] = []
    for n in a.rows:
        for popularity in ("distinct", "uniform", "zipf", "identical") if n > 1 else ("distinct",):
            adapters = adapters_of(popularity, n, n)
            size = len(set(adapters.tolist())) * panels.adapter_bytes
            seconds = sgmv_seconds(ops, panels, adapters, 15), sgmv_seconds(plain, panels, adapters, 2)
            peft = peft_seconds(adapters, 3) if popularity == "distinct" else None
            found.append((f"SGMV, {n} rows", popularity, seconds[0], size, seconds[1], peft))
    for sequences, length, queries, softcap in ATTENTION:
        pages = attention_case(sequences, length)
        size = sequences * length * 2 * KV_HEADS * DIM * 2
        ours, torchs = (attention_seconds(o, pages, queries, length, softcap) for o in (ops, plain))
        case = ("decode" if queries == 1 else f"prefill of {queries}") + (", softcap" if softcap else "")
        found.append((f"attention, {sequences} x {length}", case, ours, size, torchs, None))
    bandwidths.append(read_bandwidth(panels.slabs.view(-1)))
    best, both = max(bandwidths), ", ".join(f"{b / 1e9:.1f}" for b in bandwidths)
    print(f"\nread bandwidth {best / 1e9:.1f} GB/s ({both}), {a.threads} threads")
    print("SGMV: a step of 30 layers x 4 sites; attention: one layer. PEFT: its own loop, without the base linears.")
    table(("work", "case", "ms", "GB/s", "share", "torch ms", "PEFT ms"))
    for work, case, seconds, size, torchs, peft in found:
        speed, beside = size / seconds, "–" if peft is None else f"{1e3 * peft:.0f}"
        row(work, case, 1e3 * seconds, f"{speed / 1e9:.1f}", f"{speed / best:.0%}", f"{1e3 * torchs:.1f}", beside)
    table(("op", "rows", "µs", "torch µs"))
    for n in (1, 16, 256):
        for op, ours, torchs in pointwise(ops, plain, n):
            row(op, n, f"{1e6 * ours:.1f}", f"{1e6 * torchs:.1f}")


if __name__ == "__main__":
    main()
