"""What ptxas makes of every Triton kernel of the served formats for sm80, sm89 and sm90, which need not be there.

The interpreter checks no shapes of `tl.dot`, no memory and no registers. As nothing is compiled under it, the launches
are compiled by this file run as a script, which prints a line a kernel.
"""

import itertools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from compiled_kernels import Compiler, Facts, compiling

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.adapter_panels import GAIN, SHIFT, AdapterLayout, SiteDims
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.metadata.draft_trees import build_trees
from sgmv_kernels.metadata.plans import PageMasses, SgmvPlan, plan_of
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.triton_ops import affine as affine_triton
from sgmv_kernels.triton_ops import attention as attention_triton
from sgmv_kernels.triton_ops import block_sizes
from sgmv_kernels.triton_ops import linear as linear_triton
from sgmv_kernels.triton_ops import page_mass as page_mass_triton
from sgmv_kernels.triton_ops import pointwise as pointwise_triton
from sgmv_kernels.triton_ops import sgmv as sgmv_triton
from sgmv_kernels.triton_ops import slots as slots_triton
from sgmv_kernels.triton_ops.weight_packing import RUN

pytestmark = pytest.mark.aside

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Shared memory that a block may have."""
HIGH_RANK = "rank 256"


@dataclass(frozen=True)
class Bounds:
    """What kernels of one kind keep."""

    # Least of them that are compiled.
    kernels: int
    copy_bytes: int = 8
    waits: int = 0
    # In a loop: two for each stage of copies, others where warps share the weights of attention; of q3h for each tile.
    barriers: int = 9


LINEARS = (
    *((INT8_LEVELS, group) for group in (32, 64, 128)),
    *((INT4_LEVELS, group) for group in (32, 64, 128)),
    *((Q3H_LEVELS, group) for group in (64, 128)),
)
"""What `--quantization` and `--quantization-group` take."""
DEFAULT_LINEARS = (INT8_LEVELS, 32), (INT4_LEVELS, 32), (Q3H_LEVELS, 64)
"""Of each format the groups that it has unless told otherwise."""
FILES = (
    *(("zeros", INT4_LEVELS, group) for group in (128, 32)),
    *(("table", INT4_LEVELS, group) for group in (64, 32)),
    ("table steps", INT4_LEVELS, 32),
    ("steps", INT4_LEVELS, 32),
    ("zeros", INT4_LEVELS, 64),
    ("table", INT4_LEVELS, 128),
    *(("zeros", Q3H_LEVELS, group) for group in (64, 128)),
)
"""Factors, levels and groups of weights that only files have, the commonest first."""
COMMON_FILES = 6
HEADS = ((32, 8, 128), (9, 3, 64), (8, 4, 256), (8, 1, 80))
"""Query heads, key heads and their numbers, the commonest first."""
COMMON_HEADS = 2
SITES = {
    "qkv": SiteDims(4096, (4096, 1024, 1024)),
    "gate_up": SiteDims(4096, (14336, 14336)),
    "down": SiteDims(14336, (4096,)),
}
"""Of Llama-3-8B."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


def compile_sgmv(active: torch.dtype, stored: torch.dtype, rows: int, dims: SiteDims, rank: int) -> None:
    layout = AdapterLayout((dims,), ((tuple(rank for _ in dims.out_features),),), stored.itemsize)
    placed = layout.place([(0, layout.num_pages(1024))], 1024)
    assert placed is not None
    tables = build_tables(build_segments([0] * rows), [placed])
    plan = SgmvPlan(tables, stored, rows, sgmv_triton.prepare(tables, stored, CPU))
    x, y = torch.zeros(rows, dims.in_features, dtype=active), torch.zeros(rows, dims.total_out, dtype=active)
    sgmv_triton.sgmv_(y, x, torch.zeros(layout.num_pages(1024) * 1024, dtype=torch.uint8), plan, 0, 0)


def compile_attention(active: torch.dtype, kv_format: str, heads: int, kv_heads: int, dim: int) -> None:
    slab = torch.zeros(20 * KV_FORMATS[kv_format].page_bytes(kv_heads, dim, 16), dtype=torch.uint8)
    kv = KvPages(slab, KV_FORMATS[kv_format], kv_heads, 16, dim)
    plan = plan_of(np.zeros((2, 20), dtype=np.int32), [1, 70], [300, 300], 16, 20, CPU)
    q, lean = torch.zeros(71, heads, dim, dtype=active), torch.zeros(heads)
    for trees in (None, build_trees([(-1,), (-1, 0, 0)], np.diff(plan.query_starts), plan.kv_lens)):
        plan = replace(plan, trees=trees)
        plan = replace(plan, prepared=attention_triton.prepare(plan, CPU))
        for more in ({}, {"window": 100}, {"softcap": 50.0}, {"slopes": lean}):
            attention_triton.attention(q, kv, plan, Scoring(0.1, **more))


def compile_page_mass(active: torch.dtype, kv_format: str, heads: int, kv_heads: int, dim: int) -> None:
    slab = torch.zeros(20 * KV_FORMATS[kv_format].page_bytes(kv_heads, dim, 16), dtype=torch.uint8)
    kv = KvPages(slab, KV_FORMATS[kv_format], kv_heads, 16, dim)
    plan = plan_of(np.zeros((2, 20), dtype=np.int32), [1, 70], [300, 300], 16, 20, CPU)
    plan = replace(plan, prepared=attention_triton.prepare(plan, CPU))
    masses = PageMasses(np.array([1, 32], dtype=np.int32), torch.zeros(kv_heads, 33, 20))
    page_mass_triton.add_page_mass_(
        masses, torch.zeros(71, heads, dim, dtype=active), kv, plan, Scoring(0.1, softcap=50.0)
    )


def compile_pointwise(dtype: torch.dtype) -> None:
    kv = KvPages(torch.zeros(2 * 2 * 8 * 16 * 128 * 2, dtype=torch.uint8), KV_FORMATS["bfloat16"], 8, 16, 128)
    for rows in (1, 20):
        index = torch.arange(rows)
        angle = torch.zeros(rows, 64)
        pointwise_triton.rope_write_kv(
            torch.zeros(rows, 48 * 128, dtype=dtype), angle, angle, kv, index, index, kv.num_heads
        )
        part = angle[:, :48].contiguous()
        pointwise_triton.rope_write_kv(
            torch.zeros(rows, 48 * 128, dtype=dtype), part, part, kv, index, index, kv.num_heads
        )
    slots_triton.copy_slots([kv], np.zeros((2, 4), dtype=np.int32))
    x = torch.zeros(2, 4096, dtype=dtype)
    pointwise_triton.add_rms_norm_(x, x, torch.zeros(4096), 1e-5)
    pointwise_triton.add_rms_norm_(x, None, torch.zeros(4096), 1e-5)
    pointwise_triton.add_layer_norm_(x, x, torch.zeros(4096), 1e-5)
    pointwise_triton.gelu(x)
    pointwise_triton.silu_mul(torch.zeros(2, 2 * 14336, dtype=dtype))
    pointwise_triton.gelu_mul(torch.zeros(2, 2 * 14336, dtype=dtype))
    pointwise_triton.norm_heads_(torch.zeros(2, 48 * 128, dtype=dtype), torch.zeros(128), torch.zeros(128), 8, 1e-5)
    pointwise_triton.norm_heads_(torch.zeros(2, 7168, dtype=dtype), torch.zeros(5120), torch.zeros(1024), 1, 1e-5)
    pointwise_triton.softcap_(x, 30.0)


def compile_affine(active: torch.dtype, dims: SiteDims) -> None:
    layout = AdapterLayout(
        (dims,), (((16,) * len(dims.out_features),),), 2, places=(dims.total_out,), vectors=((GAIN | SHIFT,),)
    )
    pages = layout.num_pages(1024)
    placed = layout.place([(0, pages)], 1024)
    assert placed is not None
    tables = build_tables(build_segments([0, 0]), [placed])
    plan = SgmvPlan(tables, BF16, 2, sgmv_triton.prepare(tables, BF16, CPU))
    y = torch.zeros(2, dims.total_out, dtype=active)
    affine_triton.affine_(y, torch.zeros(pages * 1024, dtype=torch.uint8), plan, 0, 0)


def compile_writes(dtype: torch.dtype, name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Compile the write and the copy of pages of codes."""
    slab = torch.zeros(2 * KV_FORMATS[name].page_bytes(kv_heads, dim, 16), dtype=torch.uint8)
    kv, index, angle = KvPages(slab, KV_FORMATS[name], kv_heads, 16, dim), torch.arange(20), torch.zeros(20, dim // 2)
    qkv = torch.zeros(20, (heads + 2 * kv_heads) * dim, dtype=dtype)
    pointwise_triton.rope_write_kv(qkv, angle, angle, kv, index, index, kv_heads)
    slots_triton.copy_slots([kv], np.zeros((2, 4), dtype=np.int32))


def codes_with(factors: str, out: int, width: int, group: int, levels: int) -> GroupQuantizedWeight:
    """Return codes with these factors: "minima", "zeros", "steps", "table" or "table steps"; int8 has scales alone."""
    groups = out, width // group
    scales = torch.zeros(groups, dtype=torch.int8 if "steps" in factors else torch.float16)
    return GroupQuantizedWeight(
        torch.zeros(out, width, dtype=torch.int8 if levels == INT8_LEVELS else torch.uint8),
        scales,
        scales if factors in ("minima", "steps") and levels != INT8_LEVELS else None,
        levels,
        zeros=torch.zeros(groups, dtype=torch.int16) if factors == "zeros" else None,
        table=torch.arange(-8, 8, dtype=torch.int8) if "table" in factors else None,
        steps=torch.zeros(out, groups[1] // 8, 2 if factors == "steps" else 1).half() if "steps" in factors else None,
    )


def compile_linear(
    active: torch.dtype, rows: int, out: int, width: int, group: int, levels: int, factors: str = "minima"
) -> None:
    packed = linear_triton.pack_linear(codes_with(factors, out, width, group, levels), torch.zeros(out))
    linear_triton.linear(torch.zeros(rows, width, dtype=active), packed)
    packed.rows(torch.zeros(2, dtype=torch.int64))
    linear_triton.through_blas(torch.zeros(1, width, dtype=active), packed)


def compile_linears(compiler: Compiler, *, full: bool) -> None:
    """Compile the linears of a base in every format that the engine makes, activations in bf16."""
    for levels, group in LINEARS if full else DEFAULT_LINEARS:
        shapes = ((28672, 4096), (4096, 14336), (1536, 576))[: 3 if full or group == 32 else 1]
        fitting = [shape for shape in shapes if shape[1] % group == 0]
        # Tiles for more rows in all groups that `linear` has tiles of its own for, and of one width.
        many = itertools.product((64, 128) if full or group == 32 else (), fitting[:1])
        for rows, (out, width) in (*itertools.product((1, 32), fitting), *many):
            compiler.label = f"{levels} levels, groups of {group}, {rows} rows, {width} -> {out}"
            compile_linear(BF16, rows, out, width, group, levels)


def compile_served(compiler: Compiler, *, full: bool) -> None:
    """Compile what the engine launches besides for any base, activations and adapters in bf16."""
    for (site, dims), rows, rank in itertools.product(SITES.items(), (32, 512, 2048) if full else (32, 2048), (16, 64)):
        compiler.label = f"{site}, {rows} rows, rank {rank}"
        compile_sgmv(BF16, BF16, rows, dims, rank)
    for heads, kv_heads, dim in HEADS if full else HEADS[:1]:
        compiler.label = f"heads of {dim}"
        compile_attention(BF16, "bfloat16", heads, kv_heads, dim)
    compiler.label = "gains and shifts"
    compile_affine(BF16, SITES["down"])
    compiler.label = "pointwise"
    compile_pointwise(BF16)


def compile_files(compiler: Compiler, *, full: bool) -> None:
    """Compile linears with the factors that only files have: of AWQ and GPTQ, GGUF, bitsandbytes and MXFP4."""
    kinds, widths = (FILES, (28672, 4096)) if full else (FILES[:COMMON_FILES], (28672,))
    for (factors, levels, group), rows, out in itertools.product(kinds, (1, 32), widths):
        compiler.label = f"{levels} levels with {factors}, groups of {group}, {rows} rows, 4096 -> {out}"
        compile_linear(BF16, rows, out, 4096, group, levels, factors)


def compile_pages(compiler: Compiler, *, full: bool) -> None:
    """Compile what reads and writes pages of codes, and the masses of pages."""
    shapes = HEADS if full else HEADS[:COMMON_HEADS]
    for name, (heads, kv_heads, dim) in itertools.product(("int8", "k8v4"), shapes):
        compiler.label = f"{name} pages, heads of {dim}"
        compile_attention(BF16, name, heads, kv_heads, dim)
        compile_writes(BF16, name, heads, kv_heads, dim)
    for name, (heads, kv_heads, dim) in itertools.product(("bfloat16", "int8", "k8v4"), shapes):
        compiler.label = f"masses of pages in {name}, heads of {dim}"
        compile_page_mass(BF16, name, heads, kv_heads, dim)


def compile_others(compiler: Compiler, *, full: bool) -> None:
    """Compile high ranks, which are multiplied 64 at a time, kernels of tests, and for unequal dtypes."""
    del full
    small = SiteDims(576, (576, 192, 192))
    for (site, dims), rows in itertools.product(SITES.items(), (32, 2048)):
        compiler.label = f"{site}, {rows} rows, {HIGH_RANK}"
        compile_sgmv(BF16, BF16, rows, dims, 256)
    compiler.label = "other"
    compile_sgmv(FP32, FP32, 16, small, 8)
    compile_sgmv(FP16, BF16, 300, small, 64)
    compile_attention(FP32, "float32", 9, 3, 80)
    for levels in (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS):
        compile_linear(FP32, 1, 576, 576, 64, levels)
        compile_linear(FP32, 64, 4096, 4096, 128, levels)
        compile_linear(FP16, 9, 576, 576, 64, levels)


def compile_exact(compiler: Compiler, *, full: bool) -> None:
    """Compile the largest tiles of a server with `--dtype float32`, whose products take long to compile."""
    del full
    for name in ("qkv", "down"):
        compiler.label = f"{name}, 2048 rows, {HIGH_RANK}"
        compile_sgmv(FP32, FP32, 2048, SITES[name], 256)
    for heads, kv_heads, dim in HEADS:
        compiler.label = f"masses of pages, heads of {dim}"
        compile_page_mass(FP32, "float32", heads, kv_heads, dim)


KINDS = {
    "exact": compile_exact,
    "linears": compile_linears,
    "served": compile_served,
    "files": compile_files,
    "pages": compile_pages,
    "others": compile_others,
}
# Scales of pages are copied four bytes at a time, and some loads of a loop are not ahead of its products; most in heads
# of 256.
BOUNDS = {
    "linears": Bounds(30),
    "served": Bounds(40),
    "files": Bounds(15),
    "pages": Bounds(60, copy_bytes=4, waits=10, barriers=10),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["linears", "served", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("files", "pages"))]
)
def test_kernels_keep_registers_barriers_and_copies_in_bounds(kind: str) -> None:
    check(kind, 90)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_every_kernel_does_on_every_device(kind: str, arch: int) -> None:
    check(kind, arch, "all")


def check(kind: str, arch: int, *options: str) -> None:
    facts, bounds = compiled(arch, kind, *options), BOUNDS[kind]
    assert len(facts) > bounds.kernels
    wrong = [
        str(one)
        for one in facts
        if one.spills
        or one.shared > SHARED_BYTES[arch]
        or one.barriers > bounds.barriers * (RUN if one.kernel == "_runs_kernel" else 1)
        or one.waits > bounds.waits
        or one.races
        or (one.copy_bytes or bounds.copy_bytes) < bounds.copy_bytes
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["linears", "served", "pages"])
def test_a_measured_table_fits_its_device(kind: str) -> None:
    """Tiles are measured on few shapes only. There, a prompt's loop over bf16 pages was fastest with a few spills."""
    facts = compiled(90, kind, "NVIDIA H200")
    assert len(facts) > BOUNDS[kind].kernels
    wrong = [str(one) for one in facts if one.loop_spills > 8 or one.shared > SHARED_BYTES[90] or one.races]
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "options"), [(89, ()), (90, ("NVIDIA H200",))], ids=["sm89", "an H200"])
def test_kernels_in_float32_fit_the_device(arch: int, options: tuple[str, ...]) -> None:
    """Their tiles have twice the bytes. A launch that needs more shared memory than there is would fail."""
    facts = compiled(arch, "exact", *options)
    assert len(facts) >= 12
    wrong = [str(one) for one in facts if one.shared > SHARED_BYTES[arch] or one.races]
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
def test_other_kernels_compile() -> None:
    facts = compiled(90, "others")
    assert len(facts) > 10
    assert max(one.shared for one in facts) <= SHARED_BYTES[90]
    assert not [str(one) for one in facts if (one.label.endswith(HIGH_RANK) and one.spills) or one.races]


def compiled(arch: int, *which: str) -> list[Facts]:
    """Compile in a process of its own; Triton's cache on disk holds what has not changed since."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(arch), *which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Facts(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    """Print the facts of each kernel.

    Arguments: compute capability, one of `KINDS`, and `all` for rare shapes, too, or the device whose table is used.
    """
    torch.set_num_threads(1)
    arch, kind, *rest = sys.argv[1:]
    table = next((name for name in rest if name != "all"), None)
    chosen = mock.patch.object(block_sizes, "default_name", return_value=table) if table else nullcontext()
    with chosen, compiling(int(arch)) as compiler, mock.patch.object(block_sizes, "CAPABILITY", int(arch)):
        KINDS[kind](compiler, full=rest == ["all"])
    for one in compiler.facts:
        print(json.dumps(asdict(one)))


if __name__ == "__main__":
    sys.exit(main())
