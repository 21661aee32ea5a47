"""Time block sizes of the Triton kernels on this GPU and write its table for `sgmv_kernels/triton_ops/block_sizes.py`.

    python tests/benchmarks/tune_triton.py [--quick] [--out DIR]        # rows as lines of JSON; docs/gpu.md

`linear` first, for each width of a code, group and bucket of rows, narrow and wide sites apart, groups of 32 (q3h:
64), and the rows above which dequantizing for cuBLAS is faster, in the default group. Then `attention`. Then `sums`
(split_k, block_k), one choice a width, because they fix the order of additions and must not depend on the batch: the
least total time over several decode batches. Then `tiles` for each bucket of rows and ranks. `rows` is copied from the
default table. Kernels of a choice are compiled ahead, in processes. The table is written after every part, to the
folder of tables and to DIR, so that a run that is cut leaves what it has measured; the next one goes on behind it.
Llama-3-8B shapes; without a GPU: one line, exit code 2.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import gpu_cases
import torch
import triton
from bench_gpu import DIM, attention_case, attention_us
from gpu_cases import (
    DRY_RUN,
    FORMATS,
    MOST_COMPILERS,
    SITES,
    LinearCase,
    SiteCase,
    emit,
    group_of,
    linear_case,
    linear_sites,
    need_gpu,
    site_case,
    with_config,
)

from sgmv_kernels.formats.weight_codes import Q3H_LEVELS
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import attention as triton_attention
from sgmv_kernels.triton_ops import kernel_compiler
from sgmv_kernels.triton_ops.block_sizes import (
    DEFAULT,
    AttentionConfig,
    LinearConfig,
    attention_config,
    default_name,
    device_name,
    file_name,
    table_of,
)
from sgmv_kernels.triton_ops.linear import BITS, through_blas

CONFIGS = Path(__file__).parents[2] / "sgmv_kernels" / "triton_ops" / "configs"
Options = dict[str, tuple[int, ...]]
Bounds = tuple[tuple[int | None, int], ...]
SUMS: Options = {"split_k": (2, 4, 8, 16), "block_k": (64, 128, 256)}
SHRINK: Options = {"shrink_n": (16, 32), "shrink_warps": (4, 8), "shrink_stages": (3, 4)}
EXPAND: Options = {"expand_n": (64, 128, 256), "expand_warps": (4, 8)}
"""Of many rows. Of few they fix the order of additions, and are the built-in table's for all sites and ranks."""
FEW: Options = {"split_k": (4, 8), "block_k": (128,)}
FEW_SHRINK: Options = {"shrink_n": (16,), "shrink_warps": (4, 8), "shrink_stages": (3,)}
FEW_EXPAND: Options = {"expand_n": (64, 128), "expand_warps": (2, 4)}
FEW_ROWS = 256
DEFAULT_FEW = next(row for row in table_of(DEFAULT)["tiles"] if row["max_rows"] == FEW_ROWS)
DECODE: tuple[tuple[int, int], ...] = ((1, 1), (32, 8), (32, 32))
# (bound of the bucket, distinct adapters it is timed with); the last has no bound and is timed with 4096 rows.
ROWS: Bounds = ((16, 8), (64, 32), (256, 32), (1024, 8), (None, 8))
LINEAR: Options = {"block_n": (64, 128), "split_k": (1, 2, 4, 8), "warps": (4,), "stages": (3, 4)}
FEW_LINEAR: Options = {"block_n": (64, 128), "split_k": (1, 4), "warps": (4,), "stages": (3,)}
RUNS: Options = {"block_n": (64,), "split_k": (1, 2, 4, 8), "warps": (4, 8), "stages": (1, 2)}
"""Of q3h, of which a program takes eight groups at a time."""
MOST_RUN_ROWS = 32
GROUPS: Bounds = ((32, 32),)
"""(bound of the bucket, group that it is timed with): what a server takes unless told otherwise, q3h groups of 64."""
# (bound of the bucket, rows that it is timed with)
LINEAR_ROWS: Bounds = ((16, 8), (32, 32), (64, 64), (128, 128), (None, 256))
MOST_BLOCK_M = 128
NARROW_OUT = 8192
NARROW, WIDE = ("qkv", "o", "down"), ("gate_up", "head")
CROSSOVER_ROWS = (2,) if DRY_RUN else (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
RANKS: tuple[int, ...] = (16, 64)
DECODE_ATTENTION: Options = {
    "split_tokens": (128, 256, 512),
    "decode_n": (16, 32, 64),
    "decode_warps": (1, 2, 4),
    "decode_stages": (2, 3, 4),
}
PREFILL_ATTENTION: Options = {
    "prefill_m": (64, 128),
    "prefill_n": (32, 64, 128),
    "prefill_warps": (4, 8),
    "prefill_stages": (2, 3),
}
FEW_DECODE: Options = {"split_tokens": (256,), "decode_n": (16, 32), "decode_warps": (1,), "decode_stages": (4,)}
FEW_PREFILL: Options = {"prefill_m": (128,), "prefill_n": (32, 64), "prefill_warps": (8,), "prefill_stages": (2,)}
# (queries of each sequence, keys of each)
DECODES = (([1] * 2, [40] * 2),) if DRY_RUN else (([1], [2000]), ([1] * 32, [700] * 32))
PROMPTS = (([20], [20]),) if DRY_RUN else (([512], [512]), ([512], [4096]))
WORST = float("inf")
T = TypeVar("T")
PARTS = ("linear", "attention", "sums", "tiles")
if DRY_RUN:
    DECODE, ROWS, RANKS = ((2, 2),), ((16, 2),), (16,)
    GROUPS, LINEAR_ROWS = ((None, 128),), ((None, 2),)
    FEW, FEW_SHRINK = (
        {"split_k": (2,), "block_k": (64,)},
        {"shrink_n": (16,), "shrink_warps": (4,), "shrink_stages": (3,)},
    )
    FEW_EXPAND = {"expand_n": (64,), "expand_warps": (4,)}
    FEW_LINEAR, MOST_BLOCK_M = {"block_n": (32, 64), "split_k": (1,), "warps": (4,), "stages": (3,)}, 16


def best(choices: Sequence[T], us: Callable[[T], float]) -> T:
    """Return the fastest choice. What the choices launch is compiled first, in processes, while nothing is timed."""
    with mock.patch.object(gpu_cases, "graph_us", _call_once), kernel_compiler.noted() as keys:
        for choice in choices:
            us(choice)
    try:
        kernel_compiler.load(keys, lambda what, share: print(what, f"{share:.0%}", file=sys.stderr, flush=True))
    except Exception as error:
        # Left to the launch, which names the choice.
        print(f"    compiling ahead: {error!r}", file=sys.stderr)
    return min(choices, key=us)


def _call_once(calls: Sequence[Callable[[], Any]]) -> float:
    calls[0]()
    return 0.0


def microseconds(ops: Ops, case: SiteCase, **changes: Any) -> float:
    """Return the time of a site with these settings; infinite if they do not compile or fit."""
    try:
        with with_config(**changes):
            return case.us(ops)
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
        print(f"    {changes}: {type(error).__name__}", flush=True)
        return WORST


def choices(options: Options) -> list[dict[str, int]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def tune_sums(ops: Ops, device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Return one row for each width; wider sites than the widest take its row."""
    rows = []
    for width in sorted({dims.in_features for dims in SITES.values()}):
        names = [name for name, dims in SITES.items() if dims.in_features == width]
        cases = [site_case(name, b, d, 16, device) for name in names for b, d in DECODE]

        def us(choice: dict[str, int], cases: list[SiteCase] = cases) -> float:
            return sum(microseconds(ops, case, **choice, planes=choice["split_k"]) for case in cases)

        chosen = best(choices(FEW if quick else SUMS), us)
        rows.append({"max_in": width, **chosen})
        emit("sums", **rows[-1], us=us(chosen))
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
        base["planes"] = fixed["split_k"] if rows <= FEW_ROWS else 1
        if rows <= FEW_ROWS:
            base |= {name: DEFAULT_FEW[name] for name in EXPAND}
        # Shrink and expand are separate launches: one after the other, not their product.
        for options in (shrink, expand) if rows > FEW_ROWS else (shrink,):
            base |= best(choices(options), partial(_tile_us, ops, case, dict(base)))
        chosen = {name: size for name, size in base.items() if name not in ("split_k", "block_k", "planes")}
        bounds = {"max_rows": bound, "max_rank": rank * len(dims.out_features)}
        tiles.append(bounds | {"max_in": dims.in_features, "max_out": dims.total_out} | chosen)
        emit("tiles", site=name, **tiles[-1], us=microseconds(ops, case, **base))
    tiles.sort(key=lambda row: tuple(WORST if v is None else v for k, v in row.items() if k.startswith("max_")))
    return [*tiles, *table_of(DEFAULT)["tiles"]]


def _tile_us(ops: Ops, case: SiteCase, fixed: dict[str, int], choice: dict[str, int]) -> float:
    return microseconds(ops, case, **fixed, **choice)


def linear_us(cases: list[LinearCase], rows: int, config: LinearConfig) -> float:
    """Return the time of all sites together; infinite if it does not compile or fit."""
    try:
        return sum(case.configured_us(rows, config) for case in cases)
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
        print(f"    {config}: {type(error).__name__}", flush=True)
        return WORST


def linear_options(levels: int, bound: int | None, quick: bool) -> list[LinearConfig]:
    """Return what is tried for a bucket of rows: tiles that hold all of them, or as many as registers do."""
    runs = levels == Q3H_LEVELS
    rows = min(bound or MOST_BLOCK_M, MOST_RUN_ROWS if runs else MOST_BLOCK_M)
    return [
        LinearConfig(block_m=rows, **choice) for choice in choices(FEW_LINEAR if quick else RUNS if runs else LINEAR)
    ]


def tune_linears(ops: Ops, quick: bool) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return `linear` and `dequantize_above`."""
    table, above = [], {}
    for (most, group), (name, levels) in itertools.product(GROUPS, FORMATS.items()):
        bits, found = BITS[levels], {}
        if group != group_of(levels, group):
            continue
        timed = [site for site in linear_sites(name) if not quick or site in (NARROW[1], *WIDE)]
        cases = {site: linear_case(ops, site, levels, group) for site in timed}
        for (bound, rows), sites in itertools.product(LINEAR_ROWS, (NARROW, WIDE)):
            held = [case for site, case in cases.items() if site in sites]
            options = linear_options(levels, bound, quick)
            chosen = best(options, partial(linear_us, held, rows))
            found[bound, sites] = chosen
            row = {"bits": bits, "max_group": most, "max_rows": bound}
            table.append(row | {"max_out": NARROW_OUT if sites == NARROW else None} | asdict(chosen))
            emit("linear", **table[-1], us=linear_us(held, rows, chosen))
        if str(bits) not in above:
            above[str(bits)] = crossover({site: case for site, case in cases.items() if site in SITES}, found)
            emit("dequantize_above", format=name, rows=above[str(bits)])
        del cases
    return table, above


def crossover(cases: dict[str, LinearCase], found: dict[Any, LinearConfig]) -> int:
    """Return the most rows at which tiles are not slower than dequantizing, all sites together."""
    last = 0
    for rows in CROSSOVER_ROWS:
        bound = next(bound for bound, _ in LINEAR_ROWS if bound is None or rows <= bound)
        tiles = sum(
            linear_us([case], rows, found[bound, NARROW if site in NARROW else WIDE]) for site, case in cases.items()
        )
        dequantized = sum(case.us(rows, through_blas) for case in cases.values())
        if tiles > dequantized:
            break
        last = rows
    return last


def tune_attention(ops: Ops, quick: bool) -> list[dict[str, Any]]:
    """Return the row of half-precision heads and pages of up to 128 dimensions, then the default rows."""
    default = default_name(ops.device)
    first = attention_config(default, DIM, 2, codes=False)
    for options, lens in (
        (FEW_DECODE if quick else DECODE_ATTENTION, DECODES),
        (FEW_PREFILL if quick else PREFILL_ATTENTION, PROMPTS),
    ):
        copies = 2 if DRY_RUN else 8
        cases = [(of, [attention_case(*of, ops.device) for _ in range(copies)]) for of in lens]

        def us(changes: dict[str, int], cases: Any = cases, first: AttentionConfig = first) -> float:
            with mock.patch.object(triton_attention, "attention_config", return_value=replace(first, **changes)):
                try:
                    return sum(attention_us(ops, gpu_cases.graph_us, *case) for case in cases)
                except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError) as error:
                    print(f"    {changes}: {type(error).__name__}", file=sys.stderr, flush=True)
                    return WORST

        chosen = best(choices(options), us)
        first = replace(first, **chosen)
        emit("attention", **chosen, us=us(chosen))
    return [{"max_dim": 128, "max_bytes": 2, "codes": False, **asdict(first)}, *table_of(default)["attention"]]


def written(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line for each row."""
    parts = []
    for name, value in table.items():
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value) if isinstance(value, list) and value else ""
        is_rows = rows and isinstance(value[0], dict)
        parts.append(f"  {json.dumps(name)}: " + (f"[\n{rows}\n  ]" if is_rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few choices, a few minutes")
    parser.add_argument("--out", type=Path, help="folder for a second copy of the table")
    a = parser.parse_args()
    device, quick = need_gpu(), a.quick or DRY_RUN
    torch.manual_seed(0)
    kernel_compiler.MOST_PROCESSES = MOST_COMPILERS
    ops, name = Ops(device, "triton"), DEFAULT if DRY_RUN else torch.cuda.get_device_name(device)
    outs = [folder / file_name(name) for folder in ([] if DRY_RUN else [CONFIGS]) + ([a.out] if a.out else [])]
    table = table_of(device_name(device)) | {"device": name, "triton": triton.__version__}
    table.setdefault("parts", [])
    for part in PARTS:
        if part in table["parts"]:
            continue
        if part == "linear":
            linears, above = tune_linears(ops, quick)
            # Groups that were not timed take the default rows.
            table["linear"] = linears + table_of(DEFAULT)["linear"]
            table["dequantize_above"] = table_of(DEFAULT)["dequantize_above"] | above
        elif part == "attention":
            table["attention"] = tune_attention(ops, quick)
        elif part == "sums":
            table["sums"] = tune_sums(ops, device, quick)
        else:
            table["tiles"] = tune_tiles(ops, device, table["sums"], quick)
        table["parts"], table["measured"] = [*table["parts"], part], True
        table["note"] = "The parts named were measured by tests/benchmarks/tune_triton.py; the others are not."
        for out in outs:
            out.write_text(written(table), "utf-8")
    emit("tables", files=[out.name for out in outs], parts=table["parts"])


if __name__ == "__main__":
    main()
