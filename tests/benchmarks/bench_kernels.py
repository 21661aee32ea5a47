"""Time the CPU kernels and their memory throughput, beside the plain torch path and PEFT's loop, in one process.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py step --rows 1,16,32,64
    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py forms --rows 1,16,32,64
    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py kv
    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py mass
    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_kernels.py linears --rows 1,4,16,64,256,512

step: shapes are SmolLM2-135M's, adapters of rank 16 on all seven linears in bf16. "Share" is of the read bandwidth that
the same threads reach in the same run, over bytes that each workload must read once: panels of distinct adapters, or
keys and values. Each figure is the least of several rounds; the bandwidth is the better of two, measured before and
after.

forms: SGMV with a distinct adapter for every row, stored in bf16 and in int8. The forms take turns, each
turn with the next adapters of the pool, so that none stays in a cache; planning is left out, and the best turn of every
five layers counts.

kv: attention over pages of each format, in turns, over 64 layers of pages at most, more than a cache holds.

mass: the attention that pages get of observed rows, beside plain torch and attention itself, in turns over the same
pages.

linears: kernels over quantized weights against torch's own ops. Weights of 30 layers of 1536 x 1536 (71 million) go
through in turn, so that none stays in a cache. Methods take turns, and the best of several rounds counts. int4pack and
int8pack take bf16 activations and round the scales to bf16.
"""

import argparse
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from harness import arguments, row, table
from torch import Tensor

from sgmv_kernels.backend import Scoring, load_backend
from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_runtime import team
from sgmv_kernels.cpu_runtime.kernel_cache import address_of
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, recording
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import Ops

SITES = (SiteDims(576, (576, 192, 192)), SiteDims(576, (576,)), SiteDims(576, (1536, 1536)), SiteDims(1536, (576,)))
LAYERS, RANK, PAGE_BYTES = 30, 16, 12288
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
CPU = torch.device("cpu")
CHUNK = 1 << 20
# Workloads walk over so many bytes before they come back to the first: far more than a cache holds.
COLD_BYTES = 256 << 20
# Sets of adapters that `forms` takes in turn, and layers that it times together.
TURNS, PIECE = 16, 5
# (sequences, keys, observed rows of each), and layers that they are timed over.
MASSES, MASS_LAYERS = ((1, 2048, 32), (1, 8192, 32), (1, 8192, 1), (16, 2048, 1)), 8
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
    args = team.arguments(chunks, buffer.data_ptr(), CHUNK, 0)
    return chunks * CHUNK / least(lambda: team.run(kernel, args, team.team_size(), chunks), rounds=9)


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
    def make(cls, count: int, itemsize: int = 2) -> "Panels":
        layout = AdapterLayout(SITES, (((RANK,) * 3, (RANK,), (RANK,) * 2, (RANK,)),) * LAYERS, itemsize)
        pages = layout.num_pages(PAGE_BYTES)
        slabs = torch.empty((LAYERS, count * pages * PAGE_BYTES), dtype=torch.uint8)
        for slab in slabs:
            if layout.are_codes:
                slab.random_(0, 256)
            else:
                slab.view(torch.bfloat16).normal_(0, 0.02)
        made = cls(slabs, [p for i in range(count) if (p := layout.place([(i * pages, pages)], PAGE_BYTES))])
        made._scale(1e-6 if layout.are_codes else 1.0)
        return made

    def _scale(self, factor: float) -> None:
        for placed in self.placed:
            for layer, slab in enumerate(self.slabs):
                for panels in placed.layout.panels[layer]:
                    at = int(placed.offsets[layer][panels.scale])
                    slab[at : at + 4 * panels.total_rank].view(torch.float32).fill_(factor)

    @property
    def adapter_bytes(self) -> int:
        return LAYERS * self.placed[0].layout.slab_bytes


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


def _turn(ops: Ops, panels: Panels, rows: int, turn: int) -> list[Callable[[], None]]:
    """Return what computes one step's deltas with the adapters of a turn, in pieces of `PIECE` layers."""
    owners = np.arange(rows) + turn * rows
    plan = ops.plan_sgmv(build_segments(owners.astype(np.int32)), panels.placed, torch.bfloat16)
    xs = [torch.randn(rows, dims.in_features) for dims in SITES]
    ys = [torch.zeros(rows, dims.total_out) for dims in SITES]
    programs = []
    for first in range(0, LAYERS, PIECE):
        with recording() as recorded:
            for layer in range(first, first + PIECE):
                for site in range(len(SITES)):
                    ops.sgmv_(ys[site], xs[site], panels.slabs[layer], plan, layer, site)
        programs.append(Program(recorded))

    def run(program: Program, kept: object = (plan, xs, ys)) -> None:
        program.run({part.name: part.words for part in plan.prepared.parts})

    return [partial(run, program) for program in programs]


def forms(a: argparse.Namespace) -> None:
    """Time SGMV over adapters stored in bf16 and in int8, a distinct one for every row."""
    ops = Ops(CPU)
    pools = {name: Panels.make(max(a.rows), size) for name, size in (("bf16", 2), ("int8", 1))}
    bandwidth = read_bandwidth(pools["bf16"].slabs.view(-1))
    table(("distinct adapters", "bf16 ms", "GB/s", "int8 ms", "GB/s", "times"))
    for n in a.rows:
        turns = range(min(TURNS, max(a.rows) // n))
        works = {name: [_turn(ops, panels, n, turn) for turn in turns] for name, panels in pools.items()}
        pieces = {name: [NEVER] * (LAYERS // PIECE) for name in pools}
        for i in range(8 * a.rounds):
            for name, work in works.items():
                seconds = [least(piece, 1) for piece in work[i % len(turns)]]
                pieces[name] = list(map(min, pieces[name], seconds))
        best = {name: sum(of_pieces) for name, of_pieces in pieces.items()}
        speeds = {name: n * panels.adapter_bytes / best[name] / 1e9 for name, panels in pools.items()}
        shown = [cell for name in pools for cell in (1e3 * best[name], f"{speeds[name]:.1f}")]
        row(n, *shown, f"{best['bf16'] / best['int8']:.2f}")
    print(f"\nread bandwidth {bandwidth / 1e9:.1f} GB/s, {a.threads} threads")


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


def attention_case(sequences: int, length: int, kv_format: str = "bfloat16") -> tuple[list[KvPages], np.ndarray]:
    """Return layers of cold pages, and page tables in random order."""
    pages = -(-length // PAGE) * sequences
    slab_bytes = pages * KV_FORMATS[kv_format].page_bytes(KV_HEADS, DIM, PAGE)
    layers = [
        KvPages(torch.empty(slab_bytes, dtype=torch.uint8), KV_FORMATS[kv_format], KV_HEADS, PAGE, DIM)
        for _ in range(max(2, min(64, COLD_BYTES // slab_bytes)))
    ]
    every, heads = torch.arange(pages).repeat_interleave(PAGE), (pages * PAGE, KV_HEADS, DIM)
    for kv in layers:
        kv.write(every, torch.arange(PAGE).repeat(pages), torch.randn(heads), torch.randn(heads))
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
            ops.paged_attention(q, kv, plan, Scoring(DIM**-0.5, softcap=softcap))

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


def step(a: argparse.Namespace) -> None:
    """Time the deltas of a step, attention, and the small operations between them."""
    ops, plain = Ops(CPU), Ops(CPU, "torch")
    panels = Panels.make(max(a.rows))
    bandwidths = [read_bandwidth(panels.slabs.view(-1))]
    found: list[tuple[str, str, float, int, float, float | None]] = []
    for n in a.rows:
        for popularity in ("distinct", "uniform", "zipf", "identical") if n > 1 else ("distinct",):
            adapters = adapters_of(popularity, n, n)
            size = len(set(adapters.tolist())) * panels.adapter_bytes
            ours, torchs = sgmv_seconds(ops, panels, adapters, 15), sgmv_seconds(plain, panels, adapters, 2)
            peft = peft_seconds(adapters, 3) if popularity == "distinct" else None
            found.append((f"SGMV, {n} rows", popularity, ours, size, torchs, peft))
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


def mass_seconds(ops: Ops, layers: list[KvPages], tables: np.ndarray, observed: int, length: int) -> float:
    """Return the time of adding up one layer's attention by page, planning left out."""
    count = len(tables)
    q, counts = torch.randn(count * observed, HEADS, DIM), np.full(count, observed, dtype=np.int32)
    plan = ops.plan_attention(tables, [observed] * count, [length] * count, PAGE, layers[0].num_pages)
    masses = PageMasses(counts, torch.zeros(KV_HEADS, count * observed, tables.shape[1]))
    add_ = load_backend(ops.name).add_page_mass_

    def work() -> None:
        for kv in layers:
            add_(masses, q, kv, plan, Scoring(DIM**-0.5))

    work()
    return least(work, 2) / len(layers)


def masses(a: argparse.Namespace) -> None:
    """Time what `kv_policy: select` observes; kernels and formats take turns, and the best turn counts."""
    ops, plain, kinds = Ops(CPU), Ops(CPU, "torch"), [name for name in KV_FORMATS if name != "float16"]
    print(f"\nattention by page, one layer, {a.threads} threads; ms")
    table(("keys", "rows", "format", "torch", "kernel", "torch / kernel", "attention"))
    for (sequences, length, observed), kind in itertools.product(MASSES, kinds):
        layers, tables = attention_case(sequences, length, kind)
        layers, best = layers[:MASS_LAYERS], [NEVER] * 3
        for _ in range(a.rounds):
            turn = (
                mass_seconds(plain, layers, tables, observed, length),
                mass_seconds(ops, layers, tables, observed, length),
                attention_seconds(ops, (layers, tables), observed, length),
            )
            best = list(map(min, best, turn))
        shown = (f"{1e3 * best[0]:.2f}", f"{1e3 * best[1]:.3f}", f"{best[0] / best[1]:.1f}", f"{1e3 * best[2]:.3f}")
        row(f"{sequences} x {length}", observed, kind, *shown)


def kv_formats(a: argparse.Namespace) -> None:
    """Time attention over pages of every format; formats take turns, and the best turn counts."""
    ops, kinds = Ops(CPU), [name for name in KV_FORMATS if name not in ("float16", "float32")]
    print(f"\nattention, one layer, {a.threads} threads; ms")
    table(("keys", "case", *kinds, *(f"bfloat16 / {kind}" for kind in kinds[1:])))
    for sequences, length, queries, softcap in ATTENTION:
        cases = {kind: attention_case(sequences, length, kind) for kind in kinds}
        best = dict.fromkeys(kinds, NEVER)
        for _, kind in itertools.product(range(a.rounds), kinds):
            best[kind] = min(best[kind], attention_seconds(ops, cases[kind], queries, length, softcap))
        case = ("decode" if queries == 1 else f"prefill of {queries}") + (", softcap" if softcap else "")
        ratios = [f"{best['bfloat16'] / best[kind]:.2f}" for kind in kinds[1:]]
        row(f"{sequences} x {length}", case, *(f"{1e3 * best[kind]:.3f}" for kind in kinds), *ratios)


# Base linears.

WIDTH, GROUP = 1536, 64
# A method that takes longer is not run with more rows.
GIVE_UP_S, NEVER = 0.5, float("inf")
# Runs all layers with so many rows.
Run = Callable[[int], None]


def random_weight(levels: int) -> GroupQuantizedWeight:
    signed = levels == INT8_LEVELS
    low, high, dtype = (-127, 128, torch.int8) if signed else (0, levels, torch.uint8)
    scales = torch.full((WIDTH, WIDTH // GROUP), 0.01, dtype=torch.float16)
    codes = torch.randint(low, high, (WIDTH, WIDTH), dtype=dtype)
    return GroupQuantizedWeight(codes, scales, None if signed else scales * -4, levels)


def of_a_file(levels: int, *, wide: bool = False, ordered: bool = False) -> GroupQuantizedWeight:
    """Return codes as quantized files have them: with zeros, fp32 scales (`wide`), inputs in another order."""
    codes = random_weight(levels)
    return replace(
        codes,
        scales=codes.scales.float() if wide else codes.scales,
        minima=None,
        zeros=torch.randint(0, 8, codes.scales.shape, dtype=torch.int16),
        order=torch.randperm(WIDTH).int() if ordered else None,
    )


def of_16_values(*, steps: bool = False) -> GroupQuantizedWeight:
    """Return codes into a table of values, as NF4 has them; with steps, as IQ4_XS has them."""
    codes = random_weight(INT4_LEVELS)
    codes = replace(codes, minima=None, scales=codes.scales.float(), table=torch.arange(-120, 121, 16).to(torch.int8))
    return in_steps(codes) if steps else codes


def in_steps(codes: GroupQuantizedWeight) -> GroupQuantizedWeight:
    """Return codes whose factors are whole numbers of a step for 256 inputs, as K-quants have them."""
    numbers = torch.randint(1, 64, (WIDTH, WIDTH // 32), dtype=torch.int8)
    is_table = codes.table is not None
    steps = torch.full((WIDTH, WIDTH // 256, 1 if is_table else 2), 0.001, dtype=torch.float16)
    return replace(codes, scales=numbers, minima=None if is_table else numbers, steps=steps)


def ours(make: Callable[[], GroupQuantizedWeight], most: int) -> Run:
    """Return a recorded pass, as the server runs it."""
    ops, x = Ops(torch.device("cpu"), "numba"), torch.randn(most, WIDTH)
    packed = [ops.pack_linear(make(), None) for _ in range(LAYERS)]
    with recording() as recorded:
        for layer in packed:
            ops.linear(x, layer)
    program = Program(recorded)

    def run(rows: int, kept: object = (packed, x)) -> None:
        program.run({ROWS: {NUM_ROWS: rows}})

    return run


def torchs(name: str, most: int) -> Run:
    """Return one call of an op per layer, as from Python."""
    dtype = torch.float32 if name in ("fp32", "dynamic int8") else torch.bfloat16
    x = torch.randn(most, WIDTH).to(dtype)
    layers = [_torch_layer(name) for _ in range(LAYERS)]

    def run(rows: int) -> None:
        for layer in layers:
            layer(x[:rows])

    return run


def _torch_layer(name: str) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(WIDTH, WIDTH)
    if name in ("fp32", "bf16"):
        return partial(_product, weight=weight if name == "fp32" else weight.bfloat16())
    if name == "int8pack":
        values = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        return lambda x: torch._weight_int8pack_mm(x, values, torch.ones(WIDTH, dtype=torch.bfloat16))
    if name == "int4pack":
        packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (WIDTH, WIDTH), dtype=torch.int32), 1)
        factors = torch.ones(WIDTH // GROUP, WIDTH, 2, dtype=torch.bfloat16)
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, factors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        quantized = torch.quantize_per_channel(weight, torch.ones(WIDTH), torch.zeros(WIDTH).long(), 0, torch.qint8)
        prepacked = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, prepacked, True)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def methods(most: int) -> Iterator[tuple[str, Run]]:
    for name, levels in (("int4", INT4_LEVELS), ("q3h", Q3H_LEVELS), ("int8", INT8_LEVELS)):
        yield f"ours, {name}", ours(partial(random_weight, levels), most)
    files: dict[str, Callable[[], GroupQuantizedWeight]] = {
        "int4 with zeros": partial(of_a_file, INT4_LEVELS),
        "int4 with zeros, inputs in another order": partial(of_a_file, INT4_LEVELS, ordered=True),
        "int4 with zeros, fp32 scales": partial(of_a_file, INT4_LEVELS, wide=True),
        "q3h with zeros": partial(of_a_file, Q3H_LEVELS),
        "int8 with zeros, fp32 scales": partial(of_a_file, INT8_LEVELS, wide=True),
        "16 values (NF4)": of_16_values,
        "16 values, steps (IQ4_XS)": partial(of_16_values, steps=True),
        "int4, steps (Q4_K)": lambda: in_steps(random_weight(INT4_LEVELS)),
        "int8, steps (Q5_K)": lambda: in_steps(random_weight(INT8_LEVELS)),
    }
    for name, make in files.items():
        yield f"ours, {name}", ours(make, most)
    for name in ("int4pack", "int8pack", "dynamic int8", "bf16", "fp32"):
        try:
            run = torchs(name, most)
            run(1)
        except (RuntimeError, AttributeError) as error:
            print(f"{name}: not here ({str(error)[:80]})")
            continue
        yield f"torch, {name}", run


@torch.inference_mode()
def linears(a: argparse.Namespace) -> None:
    """Time one base linear over quantized weights against torch's own ops, by number of rows."""
    every = list(methods(max(a.rows)))
    best = {(name, rows): NEVER for name, _ in every for rows in a.rows}
    for _ in range(a.rounds):
        for name, run in every:
            for rows in a.rows:
                if not any(GIVE_UP_S < best[name, fewer] < NEVER for fewer in a.rows if fewer < rows):
                    best[name, rows] = min(best[name, rows], least(partial(run, rows), 1))
    cells = [(name, *(1e3 * best[name, rows] for rows in a.rows)) for name, _ in every]
    table(("ms for 71 million weights, rows:", *map(str, a.rows)), cells)


def main() -> None:
    measures = {"step": step, "forms": forms, "kv": kv_formats, "mass": masses, "linears": linears}
    a = arguments(
        __doc__,
        measures,
        rows=((1, 4, 16, 32, 64), "of SGMV, or of a linear"),
        rounds=(5, "linears, kv, mass: times that each method has its turn; forms: an eighth of the turns"),
        threads=(torch.get_num_threads(), "that compute"),
    )
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    measures[a.measure](a)


if __name__ == "__main__":
    main()
