"""Time block sizes of the Triton kernels on this GPU and write its table for `sgmv_kernels/triton_ops/block_sizes.py`.

python tests/benchmarks/tune_triton.py [--quick] [--out sgmv_kernels/triton_ops/configs/NAME.json]

First `sums` (split_k, block_k), one choice a width, because they fix the order of additions and must not depend on
the batch: the least total time over several decode batches. Then `tiles` for each bucket of rows and ranks. Then
`linear` for each width of a code, group and bucket of rows, narrow and wide sites apart, and the rows above which
dequantizing for cuBLAS is faster, in the default group. What is not tuned (attention, `rows`) is copied from the
default table. Llama-3-8B shapes; without a GPU: one line, exit code 2.
"""

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_cases import FORMATS, SITES, LinearCase, SiteCase, group_of, linear_case, need_gpu, site_case, with_config

from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops.block_sizes import DEFAULT, LinearConfig, device_name, file_name, table_of
from sgmv_kernels.triton_ops.linear import BITS, through_blas

CONFIGS = Path(__file__).parents[2] / "sgmv_kernels" / "triton_ops" / "configs"
SUMS = {"split_k": (1, 2, 4, 8, 16), "block_k": (64, 128, 256)}
SHRINK = {"shrink_n": (16, 32, 64), "shrink_warps": (2, 4, 8), "shrink_stages": (2, 3, 4)}
EXPAND = {"expand_n": (64, 128, 256), "expand_warps": (1, 2, 4, 8)}
FEW = {"split_k": (4, 8), "block_k": (128,)}
FEW_SHRINK = {"shrink_n": (16,), "shrink_warps": (4, 8), "shrink_stages": (3,)}
FEW_EXPAND = {"expand_n": (64, 128), "expand_warps": (2, 4)}
DECODE = ((1, 1), (32, 8), (32, 32))
# (bound of the bucket, distinct adapters it is timed with); the last has no bound and is timed with 4096 rows.
ROWS = ((16, 8), (128, 32), (1024, 8), (None, 8))
LINEAR = {
    "block_m": (16, 32, 64),
    "block_n": (32, 64),
    "split_k": (1, 2, 4, 8),
    "warps": (4, 8),
    "stages": (2, 3, 4),
}
FEW_LINEAR = {"block_m": (16, 32), "block_n": (32, 64), "split_k": (1, 4), "warps": (4,), "stages": (3,)}
# (bound of the bucket, group that it is timed with); groups of 32 first, which a server takes unless told otherwise.
GROUPS = ((32, 32), (64, 64), (None, 128))
# (bound of the bucket, rows that it is timed with)
LINEAR_ROWS = ((16, 1), (64, 48), (None, 160))
NARROW_OUT = 8192
NARROW, WIDE = ("qkv", "o", "down"), ("gate_up",)
CROSSOVER_ROWS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
RANKS = (16, 64)
WORST = float("inf")


def microseconds(ops: Ops, case: SiteCase, **changes: Any) -> float:
    """Return the time of a site with these settings; infinite if they do not compile or fit."""
    try:
        with with_config(**changes):
            return case.us(ops)
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
        print(f"    {changes}: {type(error).__name__}", flush=True)
        return WORST


def choices(options: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def tune_sums(ops: Ops, device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each width; wider sites than the widest take its row."""
    rows = []
    for width in sorted({dims.in_features for dims in SITES.values()}):
        names = [name for name, dims in SITES.items() if dims.in_features == width]
        cases = [site_case(name, b, d, 16, device) for name in names for b, d in DECODE]
        totals = {}
        for choice in choices(FEW if quick else SUMS):
            changes = choice | {"planes": choice["split_k"]}
            totals[tuple(choice.values())] = sum(microseconds(ops, case, **changes) for case in cases)
            print(f"sums, in {width}: {choice} {totals[tuple(choice.values())]:.1f} µs", flush=True)
        split_k, block_k = min(totals, key=totals.__getitem__)
        rows.append({"max_in": width, "split_k": split_k, "block_k": block_k})
    smaller = [row for row in table_of(DEFAULT)["sums"] if row["max_in"] and row["max_in"] < rows[0]["max_in"]]
    return smaller + rows[:-1] + [rows[-1] | {"max_in": None}]


def tune_tiles(ops: Ops, device: torch.device, sums: list[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    """Return a row for each bucket of rows and ranks and each site, then the default rows."""
    shrink, expand = (FEW_SHRINK, FEW_EXPAND) if quick else (SHRINK, EXPAND)
    tiles = []
    for (bound, adapters), rank, (name, dims) in itertools.product(ROWS[:2] if quick else ROWS, RANKS, SITES.items()):
        rows = bound or 4096
        case = site_case(name, rows, min(adapters, rows), rank, device)
        fixed = next(row for row in sums if row["max_in"] is None or dims.in_features <= row["max_in"])
        base = {"split_k": fixed["split_k"], "block_k": fixed["block_k"]}
        base["planes"] = fixed["split_k"] if rows <= 256 else 1
        # Shrink and expand are separate launches: one after the other, not their product.
        best = min(choices(shrink), key=lambda c: microseconds(ops, case, **base, **c))
        best |= min(choices(expand), key=lambda c: microseconds(ops, case, **base, **best, **c))
        bounds = {"max_rows": bound, "max_rank": rank * len(dims.out_features)}
        tiles.append(bounds | {"max_in": dims.in_features, "max_out": dims.total_out} | best)
        print(f"tiles: {tiles[-1]} {microseconds(ops, case, **base, **best):.1f} µs", flush=True)
    tiles.sort(key=lambda row: tuple(WORST if v is None else v for k, v in row.items() if k.startswith("max_")))
    return tiles + table_of(DEFAULT)["tiles"]


def linear_us(cases: list[LinearCase], rows: int, config: LinearConfig) -> float:
    """Return the time of all sites together; infinite if it does not compile or fit."""
    try:
        return sum(case.configured_us(rows, config) for case in cases)
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
        print(f"    {config}: {type(error).__name__}", flush=True)
        return WORST


def tune_linears(ops: Ops, quick: bool) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return `linear` and `dequantize_above`."""
    table, above = [], {}
    for (name, levels), (most, group) in itertools.product(FORMATS.items(), GROUPS[:1] if quick else GROUPS):
        bits, best = BITS[levels], {}
        if group != group_of(levels, group):
            continue
        cases = {site: linear_case(ops, site, levels, group) for site in ((NARROW[1], *WIDE) if quick else SITES)}
        for (bound, rows), sites in itertools.product(LINEAR_ROWS, (NARROW, WIDE)):
            held = [case for site, case in cases.items() if site in sites]
            options = [LinearConfig(**choice) for choice in choices(FEW_LINEAR if quick else LINEAR)]
            # Blocks of far fewer or more rows than there are, and splits of a sum over many rows, only cost.
            options = [
                o for o in options if rows < 4 * o.block_m < 8 * max(16, rows) and (rows <= 64 or o.split_k == 1)
            ]
            best[bound, sites] = min(options, key=lambda o, held=held, rows=rows: linear_us(held, rows, o))
            row = {"bits": bits, "max_group": most, "max_rows": bound}
            table.append(row | {"max_out": NARROW_OUT if sites == NARROW else None} | asdict(best[bound, sites]))
            print(f"linear: {table[-1]} {linear_us(held, rows, best[bound, sites]):.1f} µs", flush=True)
        if str(bits) not in above:
            above[str(bits)] = crossover(cases, best)
            print(f"{name}: dequantized above {above[str(bits)]} rows", flush=True)
        del cases
    return table, above


def crossover(cases: dict[str, LinearCase], best: dict[Any, LinearConfig]) -> int:
    """Return the most rows at which tiles are not slower than dequantizing, all sites together."""
    last = 0
    for rows in CROSSOVER_ROWS:
        bound = next(bound for bound, _ in LINEAR_ROWS if bound is None or rows <= bound)
        tiles = sum(
            linear_us([case], rows, best[bound, NARROW if site in NARROW else WIDE]) for site, case in cases.items()
        )
        if tiles > sum(case.us(rows, through_blas) for case in cases.values()):
            break
        last = rows
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few choices, a few minutes")
    parser.add_argument("--out", type=Path, help="default: the file that this device's name reads")
    a = parser.parse_args()
    device = need_gpu()
    torch.manual_seed(0)
    ops, name = Ops(device, "triton"), device_name(device)
    sums = tune_sums(ops, device, a.quick)
    tiles = tune_tiles(ops, device, sums, a.quick)
    table = dict(table_of(DEFAULT)) | {"device": name, "measured": True, "triton": triton.__version__}
    linears, above = tune_linears(ops, a.quick)
    # Groups that were not timed take the default rows.
    linears += table_of(DEFAULT)["linear"]
    table["note"] = "sums, tiles and linear measured by tests/benchmarks/tune_triton.py; rows and attention are not."
    table |= {"sums": sums, "tiles": tiles, "linear": linears, "dequantize_above": above}
    out = a.out or CONFIGS / file_name(name)
    out.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
