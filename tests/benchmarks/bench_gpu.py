"""Time the Triton kernels and base linears of Llama-3-8B's shape on a GPU, beside their floors.

    python tests/benchmarks/bench_gpu.py        # rows as lines of JSON; docs/gpu.md

The floor of a call is its bytes over the bandwidth of a copy, measured in the same run. Formats and groups that a
server takes unless told otherwise come first. Without a GPU: one line, exit code 2.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from gpu_cases import (
    DRY_RUN,
    FORMATS,
    SITES,
    LinearCase,
    copy_bandwidth,
    eager_us,
    emit,
    graph_us,
    group_of,
    linear_case,
    linear_sites,
    need_gpu,
    site_case,
)

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.formats.weight_codes import INT4_LEVELS
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops.linear import through_blas

HEADS, KV_HEADS, DIM, PAGE = (4, 2, 32, 16) if DRY_RUN else (32, 8, 128, 16)
SCORING = Scoring(DIM**-0.5)
ROWS = (2,) if DRY_RUN else (1, 16, 32, 64, 128)
# (format, group): what a server takes unless told otherwise, then the others.
LINEARS = (("int4", 32), ("int8", 32), *(() if DRY_RUN else (("int4", 128), ("q3h", 64))))
# (rows, distinct adapters, rank)
SGMV = (
    [(2, 2, 8)] if DRY_RUN else [(b, d, r) for b in (1, 32, 128) for d in (1, 8, 32, 128) for r in (16, 64) if d <= b]
)
# (sequences, keys of each) of one query, and prompts
DECODES = ((2, 40),) if DRY_RUN else ((1, 512), (32, 512), (128, 512), (1, 8192), (32, 8192))
PROMPTS = (70,) if DRY_RUN else (512, 4096)

AttentionCase = tuple[torch.Tensor, KvPages, Int32]


def attention_case(
    query_lens: list[int], kv_lens: list[int], device: torch.device, kv_format: str = "bfloat16"
) -> AttentionCase:
    """Return q, pages in random order, and page tables."""
    counts = [-(-n // PAGE) for n in kv_lens]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    page_bytes = KV_FORMATS[kv_format].page_bytes(KV_HEADS, DIM, PAGE)
    slab = torch.zeros(sum(counts) * page_bytes, device=device, dtype=torch.uint8)
    kv = KvPages(slab, KV_FORMATS[kv_format], KV_HEADS, PAGE, DIM)
    for page in torch.split(torch.arange(sum(counts), device=device), 64):
        keys, values = torch.randn(2, len(page) * PAGE, KV_HEADS, DIM, device=device)
        kv.write(page.repeat_interleave(PAGE), torch.arange(PAGE, device=device).repeat(len(page)), keys, values)
    tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    q = torch.randn(sum(query_lens), HEADS, DIM, device=device, dtype=torch.bfloat16)
    return q, kv, tables


def time_sgmv(ops: Ops, device: torch.device, bandwidth: float) -> None:
    plain = Ops(device, "torch")
    for b, d, r in SGMV:
        for site in SITES:
            case = site_case(site, b, d, r, device)
            us, floor = case.us(ops), case.site_bytes / bandwidth * 1e6
            torch_us = case.us(plain, eager_us) if r == 16 else None
            emit(
                "SGMV",
                site=site,
                rows=b,
                adapters=d,
                rank=r,
                us=us,
                floor_us=floor,
                of_copy=floor / us,
                torch_us=torch_us,
            )


def attention_us(
    ops: Ops, timer: Callable[..., float], lens: tuple[list[int], list[int]], made: list[AttentionCase]
) -> float:
    """Return the time of one layer's attention."""
    plan = ops.plan_attention(made[0][2], *lens, PAGE, made[0][1].num_pages)
    return timer([partial(ops.paged_attention, q, kv, plan, SCORING) for q, kv, _ in made])


def time_attention(ops: Ops, device: torch.device, bandwidth: float) -> None:
    plain = Ops(device, "torch")
    decodes = [([1] * b, [n] * b) for b, n in DECODES]
    shapes = [("bfloat16", *lens) for lens in [*decodes, *(([n], [n]) for n in PROMPTS)]]
    for kv_format, query_lens, kv_lens in shapes + [(name, *lens) for name in ("int8", "k8v4") for lens in decodes]:
        token_bytes = KV_FORMATS[kv_format].page_bytes(KV_HEADS, DIM, PAGE) // PAGE
        layers = max(2, min(32, -(-(128 << 20) // (sum(kv_lens) * token_bytes))))
        lens = query_lens, kv_lens
        made = [attention_case(*lens, device, kv_format) for _ in range(2 if DRY_RUN else layers)]
        took, torch_us = attention_us(ops, graph_us, lens, made), attention_us(plain, eager_us, lens, made)
        moved = sum(kv_lens) * token_bytes + 2 * sum(query_lens) * 2 * HEADS * DIM
        flops = 4 * HEADS * DIM * sum(q * (n - (q - 1) / 2) for q, n in zip(query_lens, kv_lens, strict=True))
        floor = moved / bandwidth * 1e6
        shape = {"sequences": len(query_lens), "queries": query_lens[0], "keys": kv_lens[0]}
        work = {"us": took, "floor_us": floor, "of_copy": floor / took, "tflop_s": flops / took * 1e-6}
        emit("attention", pages=kv_format, **shape, **work, torch_us=torch_us)


def tinygemm_us(case: LinearCase, rows: int) -> float | str:
    """Return the time of torch's own int4 kernel on as many weights of the same shape, or its error."""
    try:
        weights = []
        for one in case.codes:
            pairs = (one.codes[:, ::2] << 4 | one.codes[:, 1::2]).contiguous()
            scales = torch.stack((one.scales.T, one.scales.T), dim=-1).bfloat16().contiguous()
            weights.append((torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales))
        x = torch.randn(rows, case.packed[0].in_features, device=case.codes[0].codes.device, dtype=torch.bfloat16)
        mm = torch.ops.aten._weight_int4pack_mm
        return graph_us([partial(mm, x, weight, case.codes[0].group, scales) for weight, scales in weights])
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


def time_linears(ops: Ops, bandwidth: float) -> None:
    for name, group in LINEARS:
        for site, dims in linear_sites(name).items():
            out, width = dims.total_out, dims.in_features
            dense = [torch.randn(out, width, device=ops.device, dtype=torch.bfloat16) for _ in range(4)]
            levels = FORMATS[name]
            case = linear_case(ops, site, levels, group)
            for rows in ROWS:
                x = torch.randn(rows, width, device=ops.device, dtype=torch.bfloat16)
                us, floor = case.us(rows, ops.linear), case.floor_us(rows, bandwidth)
                emit(
                    "base linears",
                    site=site,
                    format=name,
                    group=group_of(levels, group),
                    rows=rows,
                    us=us,
                    floor_us=floor,
                    of_copy=floor / us,
                    dequantized_us=case.us(rows, through_blas),
                    bf16_cublas_us=graph_us([partial(torch.mm, x, weight.T) for weight in dense]),
                    tinygemm_us=tinygemm_us(case, rows) if levels == INT4_LEVELS and not DRY_RUN else None,
                )
            del case


def main() -> None:
    device = need_gpu()
    torch.manual_seed(0)
    ops, bandwidth = Ops(device, "triton"), copy_bandwidth(device)
    time_linears(ops, bandwidth)
    time_sgmv(ops, device, bandwidth)
    time_attention(ops, device, bandwidth)


if __name__ == "__main__":
    main()
