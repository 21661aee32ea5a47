"""Every Triton kernel compiles for sm90, without a GPU: the interpreter checks no shapes of `tl.dot` and no memory.

Run as a script, as under the interpreter nothing is compiled, this replaces `JITFunction.run` by one that compiles the
launch for a named target: shapes of `tl.dot`, types, shared memory. It prints a line a kernel.
"""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgmv_kernels.backend import SgmvPlan, plan_of
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.triton_ops import attention as attention_triton
from sgmv_kernels.triton_ops import linear as linear_triton
from sgmv_kernels.triton_ops import pointwise as pointwise_triton
from sgmv_kernels.triton_ops import sgmv as sgmv_triton

SM90 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CPU = torch.device("cpu")
seen: set[Any] = set()


def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands in for `JITFunction.run`, with its rules: 1 becomes a constant, multiples of 16 are known as such."""
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {name: v for name, v in options.items() if name in names}
    signature, constants, attrs = {}, {}, {}
    for i, name in enumerate(names):
        value, plain = values[name], not kernel.params[i].do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name], attrs[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr or (plain and type(value) is int and value == 1):
            signature[name], constants[i,] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if plain and value % 16 == 0:
                attrs[i,] = [["tt.divisibility", 16]]
    launch = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    key = (kernel.__name__, str(signature), str(constants), str(attrs), str(launch))
    if key in seen:
        return
    seen.add(key)
    made = triton.compile(ASTSource(kernel, signature, constants, attrs), target=SM90, options=launch)
    print(kernel.__name__, f"{made.metadata.shared} bytes of shared memory", launch, flush=True)
    assert made.metadata.shared <= SHARED_BYTES


def compile_sgmv(active: torch.dtype, stored: torch.dtype, rows: int, dims: SiteDims, rank: int) -> None:
    layout = AdapterLayout((dims,), ((tuple(rank for _ in dims.out_features),),), stored.itemsize)
    placed = layout.place([(0, layout.num_pages(1024))], 1024)
    assert placed is not None
    tables = build_tables(build_segments([0] * rows), [placed])
    plan = SgmvPlan(tables, stored, rows, sgmv_triton.prepare(tables, stored, CPU))
    x, y = torch.zeros(rows, dims.in_features, dtype=active), torch.zeros(rows, dims.total_out, dtype=active)
    sgmv_triton.sgmv_(y, x, torch.zeros(layout.num_pages(1024) * 1024, dtype=torch.uint8), plan, 0, 0)


def compile_attention(active: torch.dtype, stored: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    slab = torch.zeros(20 * 2 * kv_heads * 16 * dim * stored.itemsize, dtype=torch.uint8)
    kv = KvPages(slab, KV_FORMATS[str(stored).removeprefix("torch.")], kv_heads, 16, dim)
    plan = plan_of(np.zeros((2, 20), dtype=np.int32), [1, 70], [300, 300], 16, 20, CPU)
    prepared = attention_triton.prepare(plan, CPU)
    plan = replace(plan, prepared=prepared)
    q = torch.zeros(71, heads, dim, dtype=active)
    attention_triton.attention(q, kv, plan, 0.1, 100, None)
    attention_triton.attention(q, kv, plan, 0.1, None, 50.0)


def compile_pointwise(dtype: torch.dtype) -> None:
    kv = KvPages(torch.zeros(2 * 2 * 8 * 16 * 128 * 2, dtype=torch.uint8), KV_FORMATS["bfloat16"], 8, 16, 128)
    for rows in (1, 20):
        index = torch.arange(rows)
        angle = torch.zeros(rows, 64)
        pointwise_triton.rope_write_kv(torch.zeros(rows, 48 * 128, dtype=dtype), angle, angle, kv, index, index)
        part = angle[:, :48].contiguous()
        pointwise_triton.rope_write_kv(torch.zeros(rows, 48 * 128, dtype=dtype), part, part, kv, index, index)
    x = torch.zeros(2, 4096, dtype=dtype)
    pointwise_triton.add_rms_norm_(x, x, torch.zeros(4096), 1e-5)
    pointwise_triton.add_rms_norm_(x, None, torch.zeros(4096), 1e-5)
    pointwise_triton.silu_mul(torch.zeros(2, 2 * 14336, dtype=dtype))
    pointwise_triton.gelu_mul(torch.zeros(2, 2 * 14336, dtype=dtype))
    pointwise_triton.norm_heads_(torch.zeros(2, 48 * 128, dtype=dtype), torch.zeros(128), torch.zeros(128), 8, 1e-5)
    pointwise_triton.softcap_(x, 30.0)


def compile_linear(active: torch.dtype, rows: int, out: int, width: int, group: int, levels: int) -> None:
    scales = torch.zeros(out, width // group, dtype=torch.float16)
    stored, minima = (torch.int8, None) if levels == INT8_LEVELS else (torch.uint8, scales)
    codes = GroupQuantizedWeight(torch.zeros(out, width, dtype=stored), scales, minima, levels)
    packed = linear_triton.pack_linear(codes, torch.zeros(out))
    linear_triton.linear(torch.zeros(rows, width, dtype=active), packed)
    packed.rows(torch.zeros(2, dtype=torch.int64))
    packed.dequantize()


@pytest.mark.long
def test_kernels_compile_for_sm90(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "kernels compiled" in done.stdout


def main() -> None:
    triton.JITFunction.run = compile_launch
    bf16, fp32 = torch.bfloat16, torch.float32
    llama, small = SiteDims(4096, (4096, 1024, 1024)), SiteDims(576, (576, 192, 192))
    for rows in (1, 1100):
        compile_sgmv(bf16, bf16, rows, llama, 16)
    compile_sgmv(fp32, fp32, 16, small, 8)
    compile_sgmv(torch.float16, bf16, 300, small, 64)
    compile_attention(bf16, bf16, 32, 8, 128)
    compile_attention(fp32, fp32, 9, 3, 80)
    compile_pointwise(bf16)
    for levels, rows in itertools.product((INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS), (1, 40, 90, 200)):
        compile_linear(bf16, rows, 4096, 4096, 128, levels)
    for levels in (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS):
        compile_linear(bf16, 1, 16384, 576, 32, levels)
        compile_linear(fp32, 1, 576, 576, 64, levels)
        compile_linear(torch.float16, 9, 576, 576, 32, levels)
    print(len(seen), "kernels compiled")


if __name__ == "__main__":
    sys.exit(main())
