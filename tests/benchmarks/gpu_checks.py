"""Check on a GPU what only a GPU can show wrong: results at full shapes, equal bits, graphs over time, far addresses.

    python tests/benchmarks/gpu_checks.py [--small]        # rows as lines of JSON; docs/gpu.md

--small takes shapes for a sanitizer, under which all is a hundred times slower, and captures no graph, as torch cannot
without its cache of memory. Exit code 1: a check failed.
"""

import argparse
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from bench_gpu import DIM, HEADS, KV_HEADS, LINEARS, PAGE, SCORING, attention_case
from gpu_cases import DRY_RUN, FORMATS, PAGE_BYTES, SITES, emit, linear_case, need_gpu, site_case
from gpu_step import MAX_LEN, RANK, Computed, StepCase, random_weights

from lorasrv.models.quantization.fp8 import Fp8Linear
from lorasrv.models.spec import ModelSpec
from lorasrv.scheduler_output import PlannedDrafts
from lorasrv.worker.cuda_graphs import Recorded, cuda_recorder
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.forward_batch import build_batch
from sgmv_kernels.formats.adapter_panels import GAIN, SHIFT, AdapterLayout
from sgmv_kernels.formats.fp8 import multiplies_fp8, quantize_fp8
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.segments import BASE, build_segments
from sgmv_kernels.ops import Ops

BF16 = torch.bfloat16
MOST_ERROR, MOST_STEP_ERROR, MOST_FP8_ERROR = 1e-2, 3e-2, 5e-2
"""Of norms. Activations have 8 bits of mantissa, those of fp8 4; errors of a step's layers add up."""
FAR_BYTES = 40 << 30
AGAIN = 2 if DRY_RUN else 50
"""Repeats of a linear, and of attention: a product that outran its registers was wrong once in some hundred."""
SMALL_FAR_BYTES = 1 << 20
Check = Callable[[], Iterator[tuple[str, float, float]]]
"""A check yields (what was compared, error, most that it may be)."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is wanted; infinite for NaN."""
    value = float((got.double() - want.double()).norm() / want.double().norm())
    return value if value == value else float("inf")


def linears(ops: Ops, rows: tuple[int, ...], sites: tuple[str, ...]) -> Iterator[tuple[str, float, float]]:
    for (name, group), site in ((of, site) for of in LINEARS for site in sites):
        packed = linear_case(ops, site, FORMATS[name], group).packed[0]
        weight = packed.dequantize().double()
        for count in rows:
            x = torch.randn(count, packed.in_features, device=ops.device, dtype=BF16)
            got = ops.linear(x, packed)
            what = f"{name}/{group} {site}, {count} rows"
            yield what, error(got, x.double() @ weight.T), MOST_ERROR
            again = [ops.linear(x, packed) for _ in range(AGAIN)]
            yield f"{what}, again", float(sum(not torch.equal(got, one) for one in again)), 0.0


def adapters(ops: Ops, rows: tuple[int, ...], sites: tuple[str, ...]) -> Iterator[tuple[str, float, float]]:
    plain = Ops(ops.device, "torch")
    for site, count, rank in ((s, c, r) for s in sites for c in rows for r in (8, 64, 256)):
        case = site_case(site, count, min(count, 4), rank, ops.device)
        x, y = case.tensors()
        made = []
        for on in (plain, ops, ops):
            made.append(y.clone())
            on.sgmv_(made[-1], x, case.slabs[0], case.plan(on), 0, 0)
        what = f"{site}, {count} rows, rank {rank}"
        yield what, error(made[1], made[0]), MOST_ERROR
        yield f"{what}, again", float(not torch.equal(made[1], made[2])), 0.0


def attention(ops: Ops, shapes: tuple[tuple[list[int], list[int]], ...]) -> Iterator[tuple[str, float, float]]:
    plain = Ops(ops.device, "torch")
    for lens in shapes:
        q, kv, tables = attention_case(*lens, ops.device)
        made = []
        for on in (plain, *[ops] * (1 + AGAIN)):
            plan = on.plan_attention(tables, *lens, PAGE, kv.num_pages)
            made.append(on.paged_attention(q, kv, plan, SCORING))
        what = f"queries {lens[0][:4]}, keys {lens[1][:4]}"
        yield what, error(made[1], made[0]), MOST_ERROR
        yield f"{what}, again", float(sum(not torch.equal(made[1], one) for one in made[2:])), 0.0


def fp8(ops: Ops, rows: tuple[int, ...], sites: tuple[str, ...]) -> Iterator[tuple[str, float, float]]:
    """Check e4m3 products; nothing on a device without them."""
    for site in sites if multiplies_fp8(ops.device) else ():
        dims = SITES[site]
        linear = Fp8Linear(*quantize_fp8(torch.randn(dims.total_out, dims.in_features, device=ops.device)), None)
        for count in rows:
            x = torch.randn(count, dims.in_features, device=ops.device, dtype=BF16)
            what = f"fp8 {site}, {count} rows"
            yield what, error(linear(x), x.double() @ linear.dequantize().double().T), MOST_FP8_ERROR


def vectors(ops: Ops, rows: tuple[int, ...], sites: tuple[str, ...]) -> Iterator[tuple[str, float, float]]:
    """Check gains and shifts: DoRA, biases, norms."""
    plain = Ops(ops.device, "torch")
    for site in sites:
        dims = SITES[site]
        ranks = (tuple(RANK for _ in dims.out_features),)
        layout = AdapterLayout((dims,), (ranks,), 2, places=(dims.total_out,), vectors=((GAIN | SHIFT,),))
        pages = layout.num_pages(PAGE_BYTES)
        placed = layout.place([(0, pages)], PAGE_BYTES)
        assert placed is not None
        slab = torch.randn(pages * PAGE_BYTES // 4, device=ops.device).view(torch.uint8)
        for count in rows:
            owners = [0 if row % 3 else BASE for row in range(count)]
            y = torch.randn(count, dims.total_out, device=ops.device, dtype=BF16)
            made = []
            for on in (plain, ops):
                made.append(y.clone())
                on.affine_(made[-1], slab, on.plan_sgmv(build_segments(owners), [placed], BF16), 0, 0)
            yield f"gains and shifts of {site}, {count} rows", error(made[1], made[0]), MOST_ERROR


def codes(ops: Ops, shapes: tuple[tuple[list[int], list[int]], ...]) -> Iterator[tuple[str, float, float]]:
    """Check pages of codes: write a step's keys and values, and attend to all."""
    plain = Ops(ops.device, "torch")
    for name, lens in ((name, lens) for name in ("int8", "k8v4") for lens in shapes):
        q, kv, tables = attention_case(*lens, ops.device, name)
        qkv = torch.randn(len(q), (HEADS + 2 * KV_HEADS) * DIM, device=ops.device, dtype=BF16)
        cos, sin = torch.rand(2, len(q), DIM // 2, device=ops.device)
        made = []
        for on in (plain, ops):
            own = KvPages(kv.slab.clone(), kv.format, KV_HEADS, PAGE, DIM)
            plan = on.plan_attention(tables, *lens, PAGE, own.num_pages)
            turned = on.rope_write_kv(qkv.clone(), cos, sin, own, plan)
            made.append(on.paged_attention(turned, own, plan, SCORING))
        what = f"{name} pages, queries {lens[0][:4]}, keys {lens[1][:4]}"
        yield what, error(made[1], made[0]), MOST_ERROR


def drafts(ops: Ops, lens: tuple[list[int], list[int]]) -> Iterator[tuple[str, float, float]]:
    """Check draft trees: attention, and the copies of what is accepted of them."""
    plain, chance = Ops(ops.device, "torch"), random.Random(0)
    for name in ("bfloat16", "k8v4"):
        q, kv, tables = attention_case(*lens, ops.device, name)
        trees = [[chance.randint(-1, at - 1) for at in range(count - 1)] for count in lens[0]]
        plans = [on.plan_attention(tables, *lens, PAGE, kv.num_pages, trees) for on in (plain, ops)]
        made = [on.paged_attention(q, kv, plan, SCORING) for on, plan in zip((plain, ops), plans, strict=True)]
        yield f"trees over {name} pages", error(made[1], made[0]), MOST_ERROR
        moves = np.array([(0, 9, 0, 3), (0, 12, 0, 4), (1, 2, 0, 5)], dtype=np.int32)
        layers = kv.slab.repeat(3).view(3, -1)
        copied = []
        for on in (plain, ops):
            own = [KvPages(slab, kv.format, KV_HEADS, PAGE, DIM) for slab in layers.clone()]
            on.copy_slots(own, moves)
            copied.append(torch.stack([one.slab for one in own]))
        is_moved = not torch.equal(copied[0], layers)
        yield f"slots of {name} pages", float(not (is_moved and torch.equal(*copied))), 0.0


def graphs(
    ops: Ops, replays: int, spec: ModelSpec, record: Callable[[Callable[[], torch.Tensor]], Recorded]
) -> Iterator[tuple[str, float, float]]:
    """Replay one graph with other adapters each time, memory freed and taken again between, beside steps without."""
    rows, chance = 3 if DRY_RUN else 7, random.Random(0)
    weights = random_weights(spec, ops, "int4", BF16)
    case = StepCase(weights, ops, rows, rows, BF16, record, 40)
    eager = Decoder(weights, case.memory, DecoderLimits(MAX_LEN, 512, 64, BF16, BF16), ops)
    worst, junk = 0.0, []
    for number in range(replays):
        step = case.step(chance.randint(0, rows))
        if number % 3 == 2:
            first, *others = step.requests
            drafted = PlannedDrafts(first.token_ids, ("lookup",))
            step = replace(step, requests=(replace(first, token_ids=first.token_ids * 2, drafts=drafted), *others))
        got = case.steps.compute(step)
        assert got is not None
        logits = got[0].clone()
        # Blocks that a graph wrongly let go are taken and poisoned.
        junk = [torch.full((chance.choice((64, 4096, 1 << 18)),), float("nan"), device=ops.device) for _ in range(20)]
        worst = max(worst, error(logits, eager.forward(build_batch(step, case.memory, BF16, ops))))
    del junk
    yield f"{replays} replays", worst, MOST_STEP_ERROR


def far(ops: Ops, most: int) -> Iterator[tuple[str, float, float]]:
    """Read an adapter and columns of its A from the end of a large slab, and from its start."""
    name, rank = "qkv", 16
    dims = SITES[name]
    if ops.device.type == "cuda":
        most = min(most, torch.cuda.mem_get_info()[0] * 6 // 10)
    layout = AdapterLayout((dims,), (((rank,) * len(dims.out_features),),), BF16.itemsize)
    need, pages = layout.num_pages(PAGE_BYTES), most // PAGE_BYTES
    slab = torch.empty(pages * PAGE_BYTES, dtype=torch.uint8, device=ops.device)
    held = torch.randn(need * PAGE_BYTES // 2, device=ops.device).mul_(0.02).to(BF16).view(torch.uint8)
    made, read = [], []
    ids = torch.randint(dims.in_features, (4,), device=ops.device)
    x, y = (torch.randn(4, width, device=ops.device).to(BF16) for width in (dims.in_features, dims.total_out))
    for first in (0, pages - need):
        slab[first * PAGE_BYTES : (first + need) * PAGE_BYTES] = held
        placed = layout.place([(first, need)], PAGE_BYTES)
        assert placed is not None
        made.append(y.clone())
        plan = ops.plan_sgmv(build_segments([0] * 4), [placed], BF16)
        ops.sgmv_(made[-1], x, slab, plan, 0, 0)
        read.append(ops.columns(ids, slab[None], plan, 0, [0]))
    yield f"an adapter {most >> 20} MiB away", float(not torch.equal(*made)), 0.0
    yield f"columns {most >> 20} MiB away", float(not torch.equal(*read)), 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="shapes for a sanitizer")
    small = parser.parse_args().small or DRY_RUN
    device = need_gpu()
    torch.manual_seed(0)
    ops = Ops(device, "triton")
    rows, sites = ((2,), ("qkv",)) if small else ((1, 16, 32, 64, 100, 300), tuple(SITES))
    lens = (([1, 1], [40, 300]),) if small else (([1] * 32, [700] * 32), ([1], [20000]), ([600, 1, 5], [900, 80, 3000]))
    layers = 1 if small else 8
    size = (128, 256, HEADS, KV_HEADS, DIM, 256) if DRY_RUN else (1024, 2048, HEADS, KV_HEADS, DIM, 4096)
    spec = ModelSpec("llama", layers, *size, 2048, 1e-5)
    checks: dict[str, Check] = {
        "linears": lambda: linears(ops, rows, sites),
        "adapters": lambda: adapters(ops, rows, sites),
        "attention": lambda: attention(ops, lens),
        "fp8": lambda: fp8(ops, rows, sites),
        "vectors": lambda: vectors(ops, rows, sites),
        "codes": lambda: codes(ops, lens),
        "drafts": lambda: drafts(ops, ([3, 1], [40, 300]) if small else ([12, 1, 40, 65], [700, 80, 3000, 900])),
        "graphs": lambda: graphs(ops, 3 if small else 200, spec, Computed if small else cuda_recorder()),
        "far": lambda: far(ops, SMALL_FAR_BYTES if small else FAR_BYTES),
    }
    failed = 0
    for name, check in checks.items():
        try:
            for what, got, most in check():
                failed += got > most
                emit(name, what=what, error=got, most=most, ok=got <= most)
        except Exception as problem:
            failed += 1
            traceback.print_exc()
            emit(name, what=repr(problem)[:300], ok=False)
            if ops.device.type == "cuda" and isinstance(problem, RuntimeError) and "CUDA error" in str(problem):
                # The context is lost, and all that follows would fail.
                break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
