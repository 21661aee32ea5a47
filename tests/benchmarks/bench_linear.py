"""Time one base linear on the CPU: kernels over quantized weights against torch's own ops, by number of rows.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_linear.py --rows 1,4,16,64,256,512

Weights of 30 layers of 1536 x 1536 (71 million) go through in turn, so that none stays in a cache. Methods take turns,
and the best of several rounds counts. int4pack and int8pack take bf16 activations and round the scales to bf16.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import arguments, table
from torch import Tensor

from sgmv_kernels.cpu_runtime.launch import NUM_ROWS, ROWS, Program, recording
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight
from sgmv_kernels.ops import Ops

WIDTH, LAYERS, GROUP = 1536, 30, 64
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


def ours(levels: int, most: int) -> Run:
    """Return a recorded pass, as the server runs it."""
    ops, x = Ops(torch.device("cpu"), "numba"), torch.randn(most, WIDTH)
    packed = [ops.pack_linear(random_weight(levels), None) for _ in range(LAYERS)]
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
        yield f"ours, {name}", ours(levels, most)
    for name in ("int4pack", "int8pack", "dynamic int8", "bf16", "fp32"):
        try:
            run = torchs(name, most)
            run(1)
        except (RuntimeError, AttributeError) as error:
            print(f"{name}: not here ({str(error)[:80]})")
            continue
        yield f"torch, {name}", run


@torch.inference_mode()
def main() -> None:
    a = arguments(
        __doc__,
        rows=((1, 4, 16, 64, 256, 512), "to compare"),
        rounds=(5, "times that each method has its turn"),
    )
    every = list(methods(max(a.rows)))
    best = {(name, rows): NEVER for name, _ in every for rows in a.rows}
    for _ in range(a.rounds):
        for name, run in every:
            for rows in a.rows:
                if not any(GIVE_UP_S < best[name, fewer] < NEVER for fewer in a.rows if fewer < rows):
                    begun = time.perf_counter()
                    run(rows)
                    best[name, rows] = min(best[name, rows], time.perf_counter() - begun)
    cells = [(name, *(1e3 * best[name, rows] for rows in a.rows)) for name, _ in every]
    table(("ms for 71 million weights, rows:", *map(str, a.rows)), cells)


if __name__ == "__main__":
    main()
