"""Time the Triton kernels, base linears and a whole decode step of Llama-3-8B's shape on a GPU; Markdown tables.

    python tests/benchmarks/bench_gpu.py --out bench_gpu.md [--quick]

The floor of a call is its bytes over the bandwidth of a copy, measured in the same run. Without a GPU: one line, exit
code 2. `make gpu` runs the tests that compare results with the reference first.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import gpu_step
import numpy as np
import torch
import triton
from gpu_cases import (
    FORMATS,
    SITES,
    LinearCase,
    copy_bandwidth,
    eager_us,
    graph_us,
    linear_case,
    markdown,
    need_gpu,
    site_case,
)

from sgmv_kernels.formats.group_quant import INT4_LEVELS
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops.linear import through_blas

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ROWS, FEW_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 16, 64, 256)
SGMV_COLUMNS = ("site", "rows", "adapters", "rank", "µs", "floor µs", "GB/s", "of copy", "torch eager µs")
ATTENTION_COLUMNS = ("queries", "keys", "µs", "floor µs", "of copy", "TFLOP/s", "torch eager µs")
LINEAR_COLUMNS = ("site", "format", "rows", "µs", "floor µs", "of copy", "dequantized µs", "bf16 cuBLAS µs")
LINEAR_COLUMNS += ("tinygemm µs",)


def attention_case(query_lens: list[int], kv_lens: list[int], device: torch.device):
    """Return q, pages in random order, and page tables."""
    counts = [-(-n // PAGE) for n in kv_lens]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    slab = torch.randn(sum(counts) * 2 * KV_HEADS * PAGE * DIM, device=device, dtype=torch.bfloat16)
    tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    q = torch.randn(sum(query_lens), HEADS, DIM, device=device, dtype=torch.bfloat16)
    return q, KvPages(slab.view(torch.uint8), KV_FORMATS["bfloat16"], KV_HEADS, PAGE, DIM), tables


def sgmv_points(quick: bool) -> list[tuple[int, int, int]]:
    points = [(b, d, r) for b in (1, 32, 128) for d in (1, 8, 32, 128) for r in (8, 16, 64) if d <= b]
    return [(1, 1, 16), (32, 8, 16), (32, 32, 16)] if quick else points


def time_sgmv(ops: Ops, device: torch.device, bandwidth: float, quick: bool) -> list[list[str]]:
    plain, rows = Ops(device, "torch"), []
    for b, d, r in sgmv_points(quick):
        for site in SITES:
            case = site_case(site, b, d, r, device)
            us, floor = case.us(ops), case.site_bytes / bandwidth * 1e6
            torch_us = f"{case.us(plain, eager_us):.0f}" if r == 16 else ""
            speed = case.site_bytes / us * 1e-3
            cells = [f"{us:.1f}", f"{floor:.1f}", f"{speed:.0f}", f"{1e9 * speed / bandwidth:.0%}", torch_us]
            rows.append([site, str(b), str(d), str(r), *cells])
            print(*rows[-1], flush=True)
    return rows


def time_attention(ops: Ops, device: torch.device, bandwidth: float, quick: bool) -> list[list[str]]:
    plain, rows = Ops(device, "torch"), []
    decode = [(b, n) for b in (1, 32, 128) for n in (512, 8192)] if not quick else [(1, 512), (32, 512)]
    cases = [([1] * b, [n] * b) for b, n in decode] + [([n], [n]) for n in ((512,) if quick else (512, 4096))]
    for query_lens, kv_lens in cases:
        layers = max(2, min(32, -(-(128 << 20) // (sum(kv_lens) * 2 * KV_HEADS * DIM * 2))))
        made = [attention_case(query_lens, kv_lens, device) for _ in range(layers)]

        def us(on: Ops, timer: Callable[..., float], made=made, lens=(query_lens, kv_lens)) -> float:
            plan = on.plan_attention(made[0][2], *lens, PAGE, made[0][1].num_pages)
            return timer([partial(on.paged_attention, q, kv, plan, DIM**-0.5) for q, kv, _ in made])

        took, torch_us = us(ops, graph_us), us(plain, eager_us)
        moved = 2 * (sum(kv_lens) * 2 * KV_HEADS + sum(query_lens) * 2 * HEADS) * DIM
        flops = 4 * HEADS * DIM * sum(q * (n - (q - 1) / 2) for q, n in zip(query_lens, kv_lens, strict=True))
        share = f"{moved / took * 1e6 / bandwidth:.0%}"
        work = [f"{took:.1f}", f"{moved / bandwidth * 1e6:.1f}", share, f"{flops / took * 1e-6:.0f}", f"{torch_us:.0f}"]
        rows.append([f"{len(query_lens)} x {query_lens[0]}", str(kv_lens[0]), *work])
        print(*rows[-1], flush=True)
    return rows


def tinygemm_us(case: LinearCase, rows: int) -> str:
    """Return the time of torch's own int4 kernel on as many weights of the same shape, or its error."""
    try:
        weights = []
        for one in case.codes:
            pairs = (one.codes[:, ::2] << 4 | one.codes[:, 1::2]).contiguous()
            scales = torch.stack((one.scales.T, one.scales.T), dim=-1).bfloat16().contiguous()
            weights.append((torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales))
        x = torch.randn(rows, case.packed[0].in_features, device=case.codes[0].codes.device, dtype=torch.bfloat16)
        mm = torch.ops.aten._weight_int4pack_mm
        return f"{graph_us([partial(mm, x, weight, case.codes[0].group, scales) for weight, scales in weights]):.1f}"
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


def time_linears(ops: Ops, bandwidth: float, quick: bool) -> list[list[str]]:
    """Return rows of `LINEAR_COLUMNS`."""
    table = []
    counts: Sequence[int] = FEW_ROWS if quick else ROWS
    for site in ("o", "gate_up") if quick else SITES:
        out, width = SITES[site].total_out, SITES[site].in_features
        dense = [torch.randn(out, width, device=ops.device, dtype=torch.bfloat16) for _ in range(4)]
        for name, levels in FORMATS.items():
            case = linear_case(ops, site, levels)
            for rows in counts:
                x = torch.randn(rows, width, device=ops.device, dtype=torch.bfloat16)
                took, floor = case.us(rows, ops.linear), case.floor_us(rows, bandwidth)
                blas = case.us(rows, through_blas)
                bf16 = graph_us([partial(torch.mm, x, weight.T) for weight in dense])
                tiny = tinygemm_us(case, rows) if levels == INT4_LEVELS else ""
                cells = [f"{took:.1f}", f"{floor:.1f}", f"{floor / took:.0%}", f"{blas:.1f}", f"{bf16:.1f}", tiny]
                table.append([site, name, str(rows), *cells])
                print(*table[-1], flush=True)
            del case
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the tables go")
    parser.add_argument("--quick", action="store_true", help="few points, about two minutes")
    a = parser.parse_args()
    device = need_gpu()
    torch.manual_seed(0)
    ops, bandwidth = Ops(device, "triton"), copy_bandwidth(device)
    name = torch.cuda.get_device_name(device)
    step = f"Decode step, {gpu_step.CONTEXT} keys a row, rank {gpu_step.RANK}, in a graph"
    text = [
        f"# {name}, torch {torch.__version__}, triton {triton.__version__}\n\nCopy {bandwidth / 1e9:.0f} GB/s.",
        markdown("SGMV", SGMV_COLUMNS, time_sgmv(ops, device, bandwidth, a.quick)),
        markdown("Attention", ATTENTION_COLUMNS, time_attention(ops, device, bandwidth, a.quick)),
        markdown("Base linears, groups of 32 (q3h: 64)", LINEAR_COLUMNS, time_linears(ops, bandwidth, a.quick)),
        markdown(step, gpu_step.COLUMNS, gpu_step.time_steps(ops, bandwidth, a.quick)),
    ]
    print("\n".join(text))
    if a.out:
        a.out.write_text("\n".join(text) + "\n", "utf-8")


if __name__ == "__main__":
    main()
