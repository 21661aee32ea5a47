"""Check, then time the Triton kernels, base linears and a whole decode step on a GPU, Llama-3-8B's shape; tables.

python tests/benchmarks/bench_gpu.py --out bench_gpu.md [--quick]

The floor of a call is its bytes over the bandwidth of a copy, probed in the same run. Without a GPU: one line, exit
code 2. Figures in research notes and docstrings are expectations until this script has run.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpu_linears
import gpu_step
import numpy as np
import torch
import triton
from gpu_common import (
    SITES,
    copy_bandwidth,
    eager_us,
    graph_us,
    markdown,
    need_gpu,
    site_case,
    with_config,
)

from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference

SPLITS = (1, 2, 4, 8, 16)
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SANITIZER = "compute-sanitizer"


def check_sgmv(ops: Ops, device: torch.device) -> list[list[str]]:
    """Triton against plain torch, which tests hold against the reference."""
    plain, rows = Ops(device, "torch"), []
    for site in SITES:
        case = site_case(site, 40, 5, 16, device, permuted=True)
        x, y = case.tensors()
        got, want = y.clone(), y.float()
        ops.sgmv_(got, x, case.slabs[1], case.plan(ops), 1, 0)
        plain.sgmv_(want, x.float(), case.slabs[1], case.plan(plain), 1, 0)
        error = float((got.float() - want).norm() / want.norm())
        rows.append([site, f"{error:.1e}", "ok" if error < 1e-2 else "WRONG"])
    return rows


def attention_case(query_lens: list[int], kv_lens: list[int], device: torch.device):
    """q, pages in random order, tables."""
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


def check_attention(ops: Ops, device: torch.device) -> list[list[str]]:
    rows = []
    for query_lens, kv_lens in (([1] * 4, [5, 300, 2000, 17]), ([200, 1, 33], [200, 700, 500])):
        q, kv, tables = attention_case(query_lens, kv_lens, device)
        plan = ops.plan_attention(tables, query_lens, kv_lens, PAGE, kv.num_pages)
        got = ops.paged_attention(q, kv, plan, DIM**-0.5).cpu().float()
        lists = [t[: -(-n // PAGE)].tolist() for t, n in zip(tables, kv_lens, strict=True)]
        want = paged_attention_reference(q.cpu(), kv.keys.cpu(), kv.values.cpu(), lists, query_lens, kv_lens, DIM**-0.5)
        error = float((got - want).norm() / want.norm())
        rows.append([str(query_lens), f"{error:.1e}", "ok" if error < 1e-2 else "WRONG"])
    return rows


@triton.jit
def _nothing(x) -> None:
    pass


def launch_floor(device: torch.device) -> float:
    """One empty kernel of a chain in a graph, µs."""
    x = torch.zeros(16, device=device)
    return graph_us([lambda: _nothing[(1,)](x)] * 256)


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


def time_splits(ops: Ops, device: torch.device, quick: bool) -> list[list[str]]:
    rows = []
    for b, d in ((1, 1), (32, 8), (32, 32)) if not quick else ((1, 1),):
        for site in SITES:
            case = site_case(site, b, d, 16, device)
            cells = []
            for split in SPLITS:
                with with_config(split_k=split, planes=split):
                    cells.append(f"{case.us(ops):.1f}")
            rows.append([site, str(b), str(d), *cells])
            print(*rows[-1], flush=True)
    return rows


def time_placement(ops: Ops, device: torch.device) -> list[list[str]]:
    rows = []
    for site in SITES:
        one, other = (site_case(site, 32, 32, 16, device, permuted=p).us(ops) for p in (False, True))
        rows.append([site, f"{one:.1f}", f"{other:.1f}", f"{one / other:.0%}"])
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


def sanitize() -> list[list[str]]:
    """A small run of this script's checks under compute-sanitizer, where there is one."""
    if shutil.which(SANITIZER) is None:
        return [[SANITIZER, "not installed"]]
    rows = []
    for tool in ("memcheck", "racecheck"):
        command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--only-check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.strip().splitlines()[-1:] or [""]
        rows.append([tool, f"exit {done.returncode}: {last[0]}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the tables go")
    parser.add_argument("--quick", action="store_true", help="few points, about two minutes")
    parser.add_argument("--only-check", action="store_true", help="no timing")
    a = parser.parse_args()
    device = need_gpu()
    torch.manual_seed(0)
    ops = Ops(device, "triton")
    checks = check_sgmv(ops, device) + check_attention(ops, device) + gpu_linears.check_linears(ops)
    text = [markdown("Against plain torch and the reference", ("what", "error", ""), checks)]
    print(text[0], flush=True)
    if any(row[-1] == "WRONG" for row in checks):
        raise SystemExit("results are wrong: nothing was timed")
    if a.only_check:
        return
    bandwidth = copy_bandwidth(device)
    name, floor = torch.cuda.get_device_name(device), launch_floor(device)
    head = f"# {name}, torch {torch.__version__}, triton {triton.__version__}\n\nCopy {bandwidth / 1e9:.0f} GB/s; "
    text.insert(0, f"{head}an empty kernel in a graph {floor:.2f} µs. bf16, both launches of a site.")
    columns = ("site", "rows", "adapters", "rank", "µs", "floor µs", "GB/s", "of copy", "torch eager µs")
    text.append(markdown("SGMV", columns, time_sgmv(ops, device, bandwidth, a.quick)))
    splits = ("site", "rows", "adapters", *(f"{n} planes, µs" for n in SPLITS))
    text.append(markdown("Splits of K, rank 16", splits, time_splits(ops, device, a.quick)))
    placement = ("site", "one run µs", "permuted panels µs", "kept")
    text.append(markdown("Placement, 32 rows, 32 adapters, rank 16", placement, time_placement(ops, device)))
    columns = ("queries", "keys", "µs", "floor µs", "of copy", "TFLOP/s", "torch eager µs")
    text.append(markdown("Attention", columns, time_attention(ops, device, bandwidth, a.quick)))
    columns = gpu_linears.COLUMNS
    text.append(markdown("Base linears, groups of 128", columns, gpu_linears.time_linears(ops, bandwidth, a.quick)))
    text.append(markdown("Rows of a quantized embedding, eager", ("format", "µs"), gpu_linears.time_lookup(ops)))
    title = f"Decode step, {gpu_step.CONTEXT} keys a row, rank {gpu_step.RANK}, in a graph"
    text.append(markdown(title, gpu_step.COLUMNS, gpu_step.time_steps(ops, bandwidth, a.quick)))
    text.append(markdown("compute-sanitizer", ("tool", "result"), sanitize()))
    print("\n".join(text))
    if a.out:
        a.out.write_text("\n".join(text) + "\n", "utf-8")


if __name__ == "__main__":
    main()
