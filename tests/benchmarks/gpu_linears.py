"""Base linears on a GPU: each format at each number of rows, beside cuBLAS, tinygemm and the floor of their bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu_common import L2_BYTES, SITES, eager_us, graph_us

from sgmv_kernels.backend import PackedLinear
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import linear as linear_triton
from sgmv_kernels.triton_ops.block_sizes import LinearConfig

FORMATS = {"int8": INT8_LEVELS, "int4": INT4_LEVELS, "q3h": Q3H_LEVELS}
GROUP = 128
SHAPES = {name: (dims.total_out, dims.in_features) for name, dims in SITES.items()}
"""[O, H] of Llama-3-8B's sites."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW_ROWS = (1, 16, 64, 256)
MAX_COPIES = 64


def random_codes(out: int, width: int, levels: int, device: torch.device, group: int = GROUP) -> GroupQuantizedWeight:
    """Every level as often; weights of about the size of a model's."""
    scales = torch.rand(out, width // group, device=device).mul_(0.02).div_(levels).half()
    if levels == INT8_LEVELS:
        return GroupQuantizedWeight(
            torch.randint(-127, 128, (out, width), dtype=torch.int8, device=device), scales, None, levels
        )
    codes = torch.randint(0, levels, (out, width), dtype=torch.uint8, device=device)
    return GroupQuantizedWeight(codes, scales, (scales * (-levels / 2)).half(), levels)


@dataclass(frozen=True)
class LinearCase:
    """One site in one format, in as many copies as L2 cannot hold."""

    name: str
    levels: int
    codes: list[GroupQuantizedWeight]
    packed: list[PackedLinear]

    def floor_us(self, rows: int, bandwidth: float) -> float:
        """Codes and scales once, x once, y once, at the bandwidth of a copy."""
        one = self.packed[0]
        return (one.nbytes + 2 * rows * (one.in_features + one.out_features)) / bandwidth * 1e6

    def us(self, rows: int, call: Callable[[torch.Tensor, PackedLinear], torch.Tensor]) -> float:
        x = torch.randn(rows, self.packed[0].in_features, device=self.codes[0].codes.device, dtype=torch.bfloat16)
        return graph_us([partial(call, x, packed) for packed in self.packed])

    def configured_us(self, rows: int, config: LinearConfig) -> float:
        """With these tiles, whatever the table says."""
        return self.us(rows, lambda x, packed: linear_triton.through_tiles(x, packed, config))


def linear_case(ops: Ops, name: str, levels: int) -> LinearCase:
    out, width = SHAPES[name]
    copies = max(2, min(MAX_COPIES, -(-L2_BYTES // (out * width // 2))))
    codes = [random_codes(out, width, levels, ops.device) for _ in range(copies)]
    return LinearCase(name, levels, codes, [ops.pack_linear(one) for one in codes])


def check_linears(ops: Ops) -> list[list[str]]:
    """Against the product with the dequantized weight, fp32."""
    rows = []
    for (name, levels), group in ((item, group) for item in FORMATS.items() for group in (32, 64, 128)):
        codes = random_codes(1000, 2048, levels, ops.device, group)
        packed = ops.pack_linear(codes)
        same = torch.equal(packed.dequantize(), codes.dequantize())
        for count in (1, 17, 60, 300):
            x = torch.randn(count, 2048, device=ops.device, dtype=torch.bfloat16)
            want = x.double() @ codes.dequantize().double().T
            error = float((ops.linear(x, packed).double() - want).norm() / want.norm())
            fits = same and error < 1e-2
            rows.append([f"{name}, group {group}, {count} rows", f"{error:.1e}", "ok" if fits else "WRONG"])
    return rows


def tinygemm_us(case: LinearCase, rows: int) -> str:
    """torch's own int4 kernel on as many weights of the same shape; what it says where it cannot run."""
    try:
        weights = []
        for one in case.codes:
            pairs = (one.codes[:, ::2] << 4 | one.codes[:, 1::2]).contiguous()
            scales = torch.stack((one.scales.T, one.scales.T), dim=-1).bfloat16().contiguous()
            weights.append((torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales))
        x = torch.randn(rows, case.packed[0].in_features, device=case.codes[0].codes.device, dtype=torch.bfloat16)
        mm = torch.ops.aten._weight_int4pack_mm
        return f"{graph_us([partial(mm, x, weight, GROUP, scales) for weight, scales in weights]):.1f}"
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


def time_linears(ops: Ops, bandwidth: float, quick: bool) -> list[list[str]]:
    """Rows of a table: site, format, rows, µs, floor, share; by tiles and by BLAS; bf16 cuBLAS; tinygemm."""
    table = []
    counts: Sequence[int] = FEW_ROWS if quick else ROWS
    for site in ("o", "gate_up") if quick else SHAPES:
        out, width = SHAPES[site]
        dense = [torch.randn(out, width, device=ops.device, dtype=torch.bfloat16) for _ in range(4)]
        for name, levels in FORMATS.items():
            case = linear_case(ops, site, levels)
            for rows in counts:
                x = torch.randn(rows, width, device=ops.device, dtype=torch.bfloat16)
                took, floor = case.us(rows, ops.linear), case.floor_us(rows, bandwidth)
                blas = case.us(rows, linear_triton.through_blas)
                bf16 = graph_us([partial(torch.mm, x, weight.T) for weight in dense])
                tiny = tinygemm_us(case, rows) if levels == INT4_LEVELS else ""
                cells = [f"{took:.1f}", f"{floor:.1f}", f"{floor / took:.0%}", f"{blas:.1f}", f"{bf16:.1f}", tiny]
                table.append([site, name, str(rows), *cells])
                print(*table[-1], flush=True)
            del case
    return table


def time_lookup(ops: Ops) -> list[list[str]]:
    """The embedding over quantized bytes."""
    table = []
    for name, levels in FORMATS.items():
        packed = ops.pack_linear(random_codes(32000, 4096, levels, ops.device))
        ids = torch.randint(0, 32000, (32,), device=ops.device)
        table.append([name, f"{eager_us([partial(packed.rows, ids)] * 8):.1f}"])
    return table


COLUMNS = ("site", "format", "rows", "µs", "floor µs", "of copy", "dequantized µs", "bf16 cuBLAS µs", "tinygemm µs")
