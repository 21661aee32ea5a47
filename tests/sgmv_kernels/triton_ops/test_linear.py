"""The Triton linears over quantized codes: compiled on a CUDA device, else under Triton's interpreter."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from quantized_codes import random_codes, random_file_codes

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import linear as linear_triton
from sgmv_kernels.triton_ops import unpacking
from sgmv_kernels.triton_ops.block_sizes import LinearConfig
from sgmv_kernels.triton_ops.weight_packing import pack_codes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
CLOSE = {FLOAT: {"rtol": 1e-4, "atol": 1e-4}, HALF: {"rtol": 2e-3, "atol": 2e-3}, BF16: {"rtol": 1e-2, "atol": 1e-2}}
FEW = LinearConfig(block_m=16, block_n=32, split_k=3, warps=4, stages=2)
WHOLE = LinearConfig(block_m=16, block_n=64, split_k=1, warps=4, stages=2)
every_level = pytest.mark.parametrize("levels", [INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS])


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def on_device(codes: GroupQuantizedWeight) -> GroupQuantizedWeight:
    minima = None if codes.minima is None else codes.minima.to(DEVICE)
    return GroupQuantizedWeight(codes.codes.to(DEVICE), codes.scales.to(DEVICE), minima, codes.levels)


@pytest.fixture
def ops(triton_ops: Ops) -> Ops:
    return triton_ops


def check(got: torch.Tensor, x: torch.Tensor, codes: GroupQuantizedWeight, bias: torch.Tensor | None = None) -> None:
    want = (x.double() @ codes.dequantize().double().T + (0 if bias is None else bias)).float()
    assert got.dtype == x.dtype
    # Weights are rounded as activations are; a sum of many may come out near 0.
    close, size = CLOSE[x.dtype], float(want.square().mean().sqrt()) if len(want) else 1.0
    torch.testing.assert_close(got.cpu().float(), want, rtol=close["rtol"], atol=close["atol"] * size)


@every_level
@pytest.mark.parametrize(
    ("width", "group"), [(576, 32), long(576, 64), long(1024, 128), long(2048, 128), long(256, 32)]
)
def test_packed_codes_are_those_that_were_packed(ops: Ops, width: int, group: int, levels: int) -> None:
    codes = random_codes(levels, group, 37, width)
    packed = ops.pack_linear(on_device(codes))
    assert torch.equal(packed.dequantize().cpu(), codes.dequantize())
    ids = torch.tensor([36, 0, 5, 5])
    assert torch.equal(packed.rows(ids.to(DEVICE)).cpu(), codes.dequantize()[ids])
    assert packed.rows(ids[:0].to(DEVICE)).shape == (0, width)


class Registers:
    """Runs the few instructions of the kernels' texts on arrays of 32-bit numbers."""

    def __init__(self, dtype: torch.dtype, **held: np.ndarray) -> None:
        self._dtype, self._held = dtype, {name.replace("s", "$"): value for name, value in held.items()}

    def run(self, text: str) -> None:
        for name, operands in re.findall(r"(mov|cvt|prmt|lop3|shr|fma)\.[\w.]+ ([^;]+);", text):
            target, *sources = operands.split(", ")
            values = [self._held[one] if one in self._held else int(one, 0) for one in sources]
            self._held[target] = getattr(self, f"_{name}")(*values)

    def halves(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a register holds: two numbers, the low one first."""
        both = torch.from_numpy(np.broadcast_to(self._held[name], (256,)).astype(np.uint32).view(np.int32))
        pairs = both.clone().view(self._dtype).view(-1, 2).float()
        return pairs[:, 0], pairs[:, 1]

    def _mov(self, value: int) -> np.ndarray:
        return np.full(256, value)

    def _cvt(self, value: np.ndarray) -> np.ndarray:
        return value & 0xFFFF

    def _prmt(self, a: np.ndarray, b: int, chosen: int) -> np.ndarray:
        assert b == 0
        picked = [(i, chosen >> 4 * i & 15) for i in range(4)]
        return sum((a >> 8 * byte & 255) << 8 * i for i, byte in picked if byte < 4)

    def _lop3(self, a: np.ndarray, b: int, c: int, table: int) -> np.ndarray:
        return {0xEA: a & b, 0xBE: a ^ b}[table] | c

    def _shr(self, a: np.ndarray, bits: int) -> np.ndarray:
        return a >> bits

    def _fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        sides = []
        for shift in (0, 16):
            x, y, z = (
                torch.from_numpy((one >> shift & 0xFFFF).astype(np.uint16).view(np.int16)).view(self._dtype).double()
                for one in (a, b, c)
            )
            made = torch.addcmul(z, x, y).to(self._dtype).view(torch.int16).numpy().view(np.uint16)
            sides.append(made.astype(np.int64) << shift)
        return sides[0] | sides[1]


def pair_of(dtype: torch.dtype, value: float) -> np.ndarray:
    bits = int(torch.tensor([value], dtype=dtype).view(torch.int16).numpy().view(np.uint16)[0])
    return np.full(256, bits | bits << 16)


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_the_instructions_that_make_weights(dtype: torch.dtype) -> None:
    """What the interpreter cannot run, on every byte: codes of both bytes and halves, scaled and rounded once."""
    bytes_of = np.arange(256)
    stored = bytes_of | (bytes_of ^ 85) << 8
    factors = {"s3": 0.25, "s4": -3.0, "s5": 0.5, "s6": 7.0}
    held = {name: pair_of(dtype, value) for name, value in factors.items()}
    texts = (
        (unpacking._INT4_BF16, unpacking._INT8_BF16)
        if dtype == BF16
        else (
            unpacking._INT4_FP16,
            unpacking._INT8_FP16,
        )
    )
    four = Registers(dtype, s2=stored, **held)
    four.run(texts[0].value)
    eight = Registers(dtype, s1=stored, s2=pair_of(dtype, 0.5))
    eight.run(texts[1].value)
    for at, byte in enumerate((bytes_of, bytes_of ^ 85)):
        codes = torch.from_numpy(byte)
        assert torch.equal(four.halves("$0")[at], ((codes & 15) - 8) * 0.25 - 3.0)
        assert torch.equal(four.halves("$1")[at], ((codes >> 4) - 8) * 0.5 + 7.0)
        assert torch.equal(eight.halves("$0")[at], torch.from_numpy(byte.astype(np.uint8).view(np.int8)) * 0.5)


def test_q3h_takes_three_and_a_half_bits() -> None:
    assert pack_codes(random_codes(Q3H_LEVELS, 64, 1, 4096)).numel() * 8 == 3.5 * 4096
    # Nine groups: the first eight share seven planes, the ninth has its own.
    assert pack_codes(random_codes(Q3H_LEVELS, 64, 1, 9 * 64)).shape == (8, 1, 32)
    packed = Ops(DEVICE, "triton").pack_linear(on_device(random_codes(INT4_LEVELS, 128, 8, 4096)))
    assert packed.nbytes == 8 * (4096 // 2 + 4096 // 128 * 4)


@every_level
@pytest.mark.parametrize("config", [FEW, long(WHOLE)], ids=["planes", "one plane"])
@pytest.mark.parametrize(
    ("rows", "out", "width", "group", "dtype"),
    [
        (5, 33, 576, 64, FLOAT),
        *(long(*case, FLOAT) for case in ((1, 70, 576, 32), (17, 64, 1024, 128), (3, 100, 1280, 128))),
        (3, 40, 576, 64, BF16),
        long(3, 40, 576, 64, HALF),
    ],
    ids=str,
)
def test_unpacked_in_registers(ops: Ops, rows: int, out: int, width: int, group: int, dtype, levels, config) -> None:
    """Halves have codes as mantissas."""
    codes, x, bias = random_codes(levels, group, out, width), torch.randn(rows, width).to(dtype), torch.randn(out)
    packed = ops.pack_linear(on_device(codes), bias.to(DEVICE))
    check(linear_triton.through_tiles(x.to(DEVICE), packed, config), x, codes, bias)


@pytest.mark.parametrize("config", [FEW, long(WHOLE)], ids=["planes", "one plane"])
@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("kind", ["table", "table fp32", "table steps", "int4 steps"])
def test_tables_and_steps(ops: Ops, kind: str, dtype: torch.dtype, config: LinearConfig) -> None:
    codes, x, bias = random_file_codes(kind, 40, 512), torch.randn(5, 512).to(dtype), torch.randn(40)
    packed = ops.pack_linear(codes.to(DEVICE), bias.to(DEVICE))
    assert torch.equal(packed.dequantize().cpu(), codes.dequantize())
    ids = torch.tensor([36, 0, 5, 5])
    assert torch.equal(packed.rows(ids.to(DEVICE)).cpu(), codes.dequantize()[ids])
    check(linear_triton.through_tiles(x.to(DEVICE), packed, config), x, codes, bias)


@pytest.mark.parametrize("group", [64, long(128)])
def test_tables_in_longer_groups(ops: Ops, group: int) -> None:
    codes = random_file_codes("table fp32", 40, 512)
    wider = replace(codes, scales=codes.scales[:, : 512 // group].contiguous())
    packed = ops.pack_linear(wider.to(DEVICE))
    assert torch.equal(packed.dequantize().cpu(), wider.dequantize())
    check(linear_triton.through_tiles(torch.ones(3, 512, device=DEVICE), packed, FEW), torch.ones(3, 512), wider)


def test_what_words_cannot_hold_is_refused(ops: Ops) -> None:
    for kind in ("int4 fp32", "int8 fp32", "int8 steps", "q3h fp32"):
        assert not ops.reads(random_file_codes(kind, 40, 512).to(DEVICE)), kind


@every_level
def test_many_rows_are_left_to_blas(levels: int, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, x, bias = random_codes(levels, 64, 40, 576), torch.randn(150, 576), torch.randn(40)
    packed, used = ops.pack_linear(on_device(codes), bias.to(DEVICE)), []
    monkeypatch.setattr(linear_triton, "dequantize_above", lambda *_: 128)
    monkeypatch.setattr(linear_triton, "through_tiles", lambda *_: used.append("tiles"))
    check(ops.linear(x.to(DEVICE), packed), x, codes, bias)
    monkeypatch.setattr(linear_triton, "BLAS_BYTES", 576 * 4 * 17)
    check(ops.linear(x.to(DEVICE), packed), x, codes, bias)
    ops.linear(x[:4].to(DEVICE), packed)
    assert used == ["tiles"]


@every_level
def test_a_row_does_not_depend_on_the_rows_beside_it(levels: int, ops: Ops) -> None:
    codes, x = random_codes(levels, 64, 64, 512), torch.randn(9, 512)
    packed = ops.pack_linear(on_device(codes))
    many = ops.linear(x.to(DEVICE), packed)
    x[:4], x[5:] = float("nan"), torch.randn(4, 512)
    assert torch.equal(ops.linear(x.to(DEVICE), packed)[4], many[4])
    assert torch.equal(ops.linear(x[4:5].to(DEVICE), packed)[0], many[4])


@pytest.mark.parametrize(
    ("levels", "group", "rows", "width"),
    [(INT8_LEVELS, 576, 2, 576), (INT4_LEVELS, 32, 0, 64), (INT4_LEVELS, 32, 2, 160), (INT8_LEVELS, 96, 2, 288)],
)
def test_one_scale_a_channel_no_rows_and_half_a_tile(ops: Ops, levels: int, group: int, rows: int, width: int) -> None:
    """A group of int8 may be of any size that 32 divides; it is taken in tiles."""
    codes, x = random_codes(levels, group, 20, width), torch.randn(rows, width)
    check(ops.linear(x.to(DEVICE), ops.pack_linear(on_device(codes))), x, codes)


@every_level
def test_groups_without_tiles_are_refused(levels: int, ops: Ops) -> None:
    with pytest.raises(KernelArgumentError, match="groups of 24"):
        ops.pack_linear(on_device(random_codes(levels, 24, 4, 48)))


def test_arguments_are_checked(ops: Ops) -> None:
    codes = on_device(random_codes(INT4_LEVELS, 32, 20, 64))
    with pytest.raises(KernelArgumentError, match=r"bias must be float32 \[20\]"):
        ops.pack_linear(codes, torch.zeros(19))
    with pytest.raises(KernelArgumentError, match=r"contiguous \[T, 64\]"):
        ops.linear(torch.zeros(2, 32, device=DEVICE), ops.pack_linear(codes))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_against_tinygemm(ops: Ops, group: int, rows: int) -> None:
    """torch's own kernel, whose weights are (code - 8) * scale + zero in bf16."""
    codes = random_codes(INT4_LEVELS, group, 1024, 2048)
    scales = codes.scales.bfloat16()
    zeros = (codes.minima.float() + 8 * scales.float()).bfloat16()
    same = GroupQuantizedWeight(codes.codes, scales.half(), (zeros.float() - 8 * scales.float()).half(), INT4_LEVELS)
    x = torch.randn(rows, 2048, device=DEVICE, dtype=torch.bfloat16)
    packed = same.codes.to(DEVICE)
    tiny = torch.ops.aten._convert_weight_to_int4pack((packed[:, ::2] << 4 | packed[:, 1::2]).contiguous(), 8)
    pairs = torch.stack((scales.T, zeros.T), dim=-1).contiguous().to(DEVICE)
    want = torch.ops.aten._weight_int4pack_mm(x, tiny, group, pairs).float()
    got = ops.linear(x, ops.pack_linear(on_device(same))).float()
    assert float((got - want).norm() / want.norm()) < 1e-2
