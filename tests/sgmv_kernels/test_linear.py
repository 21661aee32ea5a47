"""Linears over weight codes: exact against their definition, for every format, by every kernel of this machine."""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_codes import FILE_KINDS, random_codes, random_file_codes, random_packed
from torch import Tensor

from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.cpu_arguments.block import NUM_ROWS, WORDS
from sgmv_kernels.cpu_arguments.linear import PEAKS
from sgmv_kernels.cpu_ops import linear as linear_cpu
from sgmv_kernels.cpu_ops import linear_autotune as linear_probe
from sgmv_kernels.cpu_ops.weight_packing import pack_tiles
from sgmv_kernels.cpu_runtime import launch, measurements
from sgmv_kernels.cpu_runtime.kernel_cache import address_of
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, recording
from sgmv_kernels.cpu_simd.quant_ir import HAS_PAIR_DOT, HAS_SIGNED_DOT
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight, join_codes, stack_codes
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import linear_reference

LEVELS = (INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS)
FORMATS = list(zip([INT8_LEVELS, INT4_LEVELS, Q3H_LEVELS] * 2, [32, 32, 64, 64, 128, 128], strict=True))
FACTORS = (torch.float16, torch.float32)
every_format = pytest.mark.parametrize(("levels", "group"), FORMATS)
NUMBA = Ops(torch.device("cpu"), "numba")


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).abs().max() / expected.abs().max())


@every_format
@pytest.mark.parametrize(("count", "out", "inputs"), [(1, 64, 128), (5, 50, 1280), (17, 7, 256), (0, 16, 128)])
def test_linear_is_its_definition(ops: Ops, levels: int, group: int, count: int, out: int, inputs: int) -> None:
    codes, x = random_codes(levels, group, out, inputs), rows(count, inputs)
    for own in (None, rows(1, out, seed=2)[0]):
        y = ops.linear(x, ops.pack_linear(codes, own))
        assert (y.dtype, y.shape) == (torch.float32, (count, out))
        if count:
            assert error(y, linear_reference(x, codes, own, rounded=ops.name == "numba")) < 1e-6


@every_format
def test_packing_loses_nothing(ops: Ops, levels: int, group: int) -> None:
    codes = random_codes(levels, group, 43, 256)
    packed = ops.pack_linear(codes, None)
    assert torch.equal(packed.dequantize(), codes.dequantize())
    ids = torch.tensor([42, 0, 7, 7, 16])
    assert torch.equal(packed.rows(ids), codes.dequantize()[ids])
    assert packed.rows(ids[:0]).shape == (0, 256)


@given(
    st.sampled_from(FORMATS),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 2**31),
    st.sampled_from([None, *FACTORS]),
    st.booleans(),
)
def test_tiles_are_the_codes(
    form: tuple[int, int], out: int, groups: int, seed: int, dtype: torch.dtype | None, ordered: bool
) -> None:
    codes = random_codes(*form, out, groups * form[1], seed)
    if dtype is not None:
        codes = random_packed(*form, out, groups * form[1], dtype=dtype, ordered=ordered, seed=seed)
    found = pack_tiles(codes).unpack()
    assert torch.equal(found.dequantize(), codes.dequantize())
    for name in ("codes", "minima", "zeros", "order"):
        ours, theirs = getattr(found, name), getattr(codes, name)
        assert (ours is None) == (theirs is None)
        assert theirs is None or torch.equal(ours, theirs), name
    assert torch.equal(found.scales.float(), codes.scales.float())


packed_kinds = pytest.mark.parametrize(
    ("dtype", "ordered"), [(torch.float16, False), (torch.float16, True), (torch.float32, False), (torch.float32, True)]
)


@every_format
@packed_kinds
def test_zeros_scales_and_orders_of_files(ops: Ops, levels: int, group: int, dtype: torch.dtype, ordered: bool) -> None:
    codes = random_packed(levels, group, 50, 256, dtype=dtype, ordered=ordered)
    if not ops.reads(codes):
        assert ops.name == "triton"
        with pytest.raises(KernelArgumentError, match="a GPU's kernels take"):
            ops.pack_linear(codes)
        return
    packed, bias = ops.pack_linear(codes), rows(1, 50, seed=2)[0]
    assert torch.equal(packed.dequantize(), codes.dequantize())
    assert torch.equal(packed.rows(torch.tensor([3, 49])), codes.dequantize()[[3, 49]])
    for count in (1, 3, 9):
        x = rows(count, 256)
        y = ops.linear(x, ops.pack_linear(codes, bias))
        assert error(y, linear_reference(x, codes, bias, rounded=ops.name == "numba")) < 1e-6


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_tables_minima_and_steps_of_files(ops: Ops, kind: str) -> None:
    codes = random_file_codes(kind, 50, 512)
    packed, bias = ops.pack_linear(codes), rows(1, 50, seed=2)[0]
    assert torch.equal(packed.dequantize(), codes.dequantize())
    assert torch.equal(packed.rows(torch.tensor([3, 49])), codes.dequantize()[[3, 49]])
    together = ops.linear(rows(9, 512), ops.pack_linear(codes, bias))
    assert error(together, linear_reference(rows(9, 512), codes, bias, rounded=ops.name == "numba")) < 1e-6
    for count in (1, 3) if ops.name == "numba" else ():
        assert torch.equal(ops.linear(rows(9, 512)[:count].clone(), ops.pack_linear(codes, bias)), together[:count])


@given(st.sampled_from(FILE_KINDS), st.integers(1, 40), st.integers(1, 2), st.integers(0, 2**31))
def test_tiles_are_the_codes_of_files(kind: str, out: int, runs: int, seed: int) -> None:
    codes = random_file_codes(kind, out, 256 * runs, seed)
    found = pack_tiles(codes).unpack()
    for name in ("codes", "scales", "minima", "zeros", "order", "table", "steps"):
        ours, theirs = getattr(found, name), getattr(codes, name)
        assert (ours is None) == (theirs is None), name
        assert theirs is None or torch.equal(ours, theirs), name


def test_a_table_is_codes_of_its_values() -> None:
    """The same bits: entries are whole numbers, as codes of 256 levels are."""
    codes, x = random_file_codes("table", 40, 256), rows(9, 256)
    assert codes.table is not None
    values = codes.table[codes.codes.long()]
    same = GroupQuantizedWeight(values, codes.scales, None, INT8_LEVELS)
    assert torch.equal(NUMBA.linear(x, NUMBA.pack_linear(codes)), NUMBA.linear(x, NUMBA.pack_linear(same)))


def test_steps_are_factors_of_factors() -> None:
    """The same bits by the kernel of fp32 factors."""
    codes, x = random_file_codes("int4 steps", 40, 512), rows(9, 512)
    scales, minima = codes.factors()
    same = replace(codes, scales=scales, minima=minima, steps=None)
    assert torch.equal(codes.dequantize(), same.dequantize())
    assert torch.equal(NUMBA.linear(x, NUMBA.pack_linear(codes)), NUMBA.linear(x, NUMBA.pack_linear(same)))


@every_format
def test_another_order_of_inputs_is_another_order_of_x(levels: int, group: int) -> None:
    """To the bit, where activations are rounded in the order of the columns."""
    codes, x = random_packed(levels, group, 40, 256, dtype=torch.float16, ordered=True), rows(5, 256)
    assert codes.order is not None
    straight = replace(codes, order=None)
    want = NUMBA.linear(x[:, codes.order.long()].contiguous(), NUMBA.pack_linear(straight))
    assert torch.equal(NUMBA.linear(x, NUMBA.pack_linear(codes)), want)


def test_a_zero_is_a_minimum_of_minus_zero_times_scale() -> None:
    """Where fp16 holds that: the same bits by either kernel."""
    codes = random_packed(INT4_LEVELS, 64, 40, 256, dtype=torch.float16)
    assert codes.zeros is not None
    codes.scales.fill_(2**-7)
    same = replace(codes, minima=(-codes.zeros * codes.scales).half(), zeros=None)
    x = rows(9, 256)
    assert torch.equal(NUMBA.linear(x, NUMBA.pack_linear(codes)), NUMBA.linear(x, NUMBA.pack_linear(same)))


def test_parts_are_one_linear(ops: Ops) -> None:
    """Of other bits, groups, factors and orders; neighbours of one kind are packed together."""
    shared = random_packed(INT4_LEVELS, 32, 16, 256, dtype=torch.float16, ordered=True)
    parts = [
        shared,
        replace(random_packed(INT4_LEVELS, 32, 7, 256, dtype=torch.float16, seed=1), order=shared.order),
        random_packed(Q3H_LEVELS, 64, 21, 256, dtype=torch.float16, ordered=True, seed=2),
        random_codes(INT8_LEVELS, 32, 5, 256, seed=3),
        random_codes(INT4_LEVELS, 128, 33, 256, seed=4),
    ]
    assert [part.out_features for part in join_codes(parts)] == [23, 21, 5, 33]
    bias = rows(1, 82, seed=5)[0]
    packed = ops.pack_parts(parts, bias)
    assert (packed.in_features, packed.out_features) == (256, 82)
    assert torch.equal(packed.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(packed.rows(torch.tensor([81, 0])), packed.dequantize()[[81, 0]])
    for count in (0, 1, 9):
        x, first = rows(count, 256), 0
        y = ops.linear(x, packed)
        assert y.shape == (count, 82)
        for part in parts:
            columns = slice(first, first + part.out_features)
            first = columns.stop
            if count:
                own = ops.linear(x, ops.pack_linear(part, bias[columns].contiguous()))
                torch.testing.assert_close(y[:, columns], own, rtol=0 if ops.name == "numba" else 1e-5, atol=1e-6)
    with pytest.raises(KernelArgumentError, match="the same inputs"):
        ops.pack_parts([shared, random_codes(INT4_LEVELS, 32, 4, 64)])


def test_smaller_groups_are_the_same_weight() -> None:
    codes = random_packed(INT4_LEVELS, 128, 8, 256, dtype=torch.float32)
    assert torch.equal(codes.in_groups_of(32).dequantize(), codes.dequantize())
    assert codes.in_groups_of(32).group == 32


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_parts_of_the_inputs_are_the_same_weight(kind: str) -> None:
    """Cut between groups, or between runs of groups that share a step."""
    codes = random_file_codes(kind, 8, 1536)
    parts = [codes.of_inputs(slice(first, end)) for first, end in ((0, 512), (512, 1536))]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], dim=1), codes.dequantize())
    assert codes.of_inputs(slice(None)) is codes
    with pytest.raises(KernelArgumentError, match="are no whole groups of"):
        codes.of_inputs(slice(0, 48))
    with pytest.raises(KernelArgumentError, match="order of the file's own"):
        random_packed(INT4_LEVELS, 32, 8, 64, dtype=torch.float16, ordered=True).of_inputs(slice(0, 32))


def test_an_order_that_is_none_is_refused() -> None:
    codes = random_packed(INT4_LEVELS, 32, 8, 64, dtype=torch.float16, ordered=True)
    for wrong in (torch.zeros(64, dtype=torch.int32), torch.arange(1, 65, dtype=torch.int32)):
        with pytest.raises(KernelArgumentError, match="order must have every input once"):
            NUMBA.pack_linear(replace(codes, order=wrong))


@every_format
def test_a_row_does_not_depend_on_those_beside_it(levels: int, group: int) -> None:
    packed, x = NUMBA.pack_linear(random_codes(levels, group, 200, 384), None), rows(23, 384)
    together = NUMBA.linear(x, packed)
    for count in range(1, 12):
        assert torch.equal(NUMBA.linear(x[3 : 3 + count].clone(), packed), together[3 : 3 + count])


@pytest.mark.parametrize(("levels", "group"), [(INT4_LEVELS, 32), (Q3H_LEVELS, 64)])
@pytest.mark.parametrize("out", [31, 33, 64])
def test_nothing_is_written_beside_the_result(
    levels: int, group: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither beside its columns of a wider result, nor around a thread's scratch memory."""
    margin, scratch = 1 << 14, []

    def with_margins(name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        scratch.append(torch.full((2 * margin + math.prod(shape),), 0xA5, dtype=torch.uint8))
        return scratch[-1][margin:-margin].view(shape)

    packed = linear_cpu.pack_linear_cpu(random_codes(levels, group, out, 2048), None, None)
    for module in (linear_cpu, launch):  # The one sizes scratch memory, the other starts threads.
        monkeypatch.setattr(module, "team_size", lambda: 1)
    for count in (1, 9, 70):
        x, wide = rows(count, 2048), torch.full((count + 2, 3 + out + 40), -7.0)
        rounded = linear_cpu.round_rows(x)
        with monkeypatch.context() as patch:
            patch.setattr(linear_cpu, "empty", with_margins)
            linear_cpu._multiply(rounded, packed, wide[:count, 3 : 3 + out])
        y = wide[:count, 3 : 3 + out].clone()
        wide[:count, 3 : 3 + out] = -7
        assert bool((wide == -7).all())
        assert bool((scratch[-1][:margin] == 0xA5).all())
        assert bool((scratch[-1][-margin:] == 0xA5).all())
        assert torch.equal(y, linear_cpu.linear_cpu(x, packed))


def test_largest_products_do_not_overflow() -> None:
    for levels, sign in itertools.product(LEVELS, (1.0, -1.0)):
        codes, x = random_codes(levels, 64, 16, 128), torch.full((4, 128), sign)
        codes.codes.fill_(-128 if levels == INT8_LEVELS else levels - 1)
        y = NUMBA.linear(x, NUMBA.pack_linear(codes, None))
        assert error(y, linear_reference(x, codes, None, rounded=True)) < 1e-6


@pytest.mark.parametrize("levels", [INT8_LEVELS, INT4_LEVELS])
def test_bad_numbers_stay_in_their_row_and_zeros_are_zero(levels: int) -> None:
    codes, x = random_codes(levels, 32, 48, 96), rows(6, 96)
    x[1, 40], x[2, 0], x[3], x[4, 32:64] = torch.nan, torch.inf, 0, 1e-35
    y = NUMBA.linear(x, NUMBA.pack_linear(codes, None))
    assert y[1:3].isnan().all()
    assert (y[3] == 0).all()
    good = [0, 3, 4, 5]
    assert error(y[good], linear_reference(x[good], codes, None, rounded=True)) < 1e-6


@pytest.mark.parametrize("wrong", [43, -1])
def test_rows_that_do_not_exist_are_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match="from 0 to 42"):
        NUMBA.pack_linear(random_codes(INT8_LEVELS, 32, 43, 64), None).rows(torch.tensor([0, wrong]))


def test_rounding_reads_no_rows_that_do_not_exist() -> None:
    rounded = linear_cpu.round_rows(rows(11, 96))
    codes, units = rounded.codes[0].unbind(1), rounded.units[0].unbind(2)
    assert all(torch.equal(codes[10], beyond) for beyond in codes[11:])
    assert all(torch.equal(units[10], beyond) for beyond in units[11:])


def test_a_recorded_launch_rounds_what_it_computes() -> None:
    x, other = rows(11, 96), rows(11, 96, seed=3)
    # Kept: a recorded launch has only its address.
    weight = rows(1, 96)[0]
    made: list[tuple[Callable[[], Tensor], Tensor]] = [
        (lambda: NUMBA.add_rms_norm_(x, None, weight, 1e-5), x),
        (lambda: NUMBA.add_layer_norm_(x, None, weight, 1e-5), x),
        (lambda: NUMBA.silu_mul(gate_up), other),
    ]
    gate_up = rows(11, 192)
    for compute, another in made:
        with recording() as recorded:
            computed = compute()
            rounded = linear_cpu.round_rows(computed)
        assert len(recorded.launches) == 1
        Program(recorded).run({ROWS: {NUM_ROWS: 11}})
        plain = linear_cpu.round_rows(computed.clone())
        assert torch.equal(rounded.codes, plain.codes)
        assert torch.equal(rounded.units, plain.units)
        with recording() as apart:
            compute()
            linear_cpu.round_rows(another)
        assert len(apart.launches) == 2, "it computes something else"


@pytest.mark.parametrize("is_capped", [False, True])
def test_a_recorded_linear_finds_its_largest_outputs(is_capped: bool) -> None:
    """Of the rows of a run: the first of equals, which are of different tasks; none where an output is no number."""
    half, x = random_codes(INT8_LEVELS, 32, 617, 96), rows(11, 96)
    x[1, 40], x[2, 0], x[3] = torch.nan, torch.inf, 0
    packed = NUMBA.pack_linear(stack_codes([half, half]), None)

    def chosen() -> tuple[Tensor, Tensor]:
        y = NUMBA.linear(x, packed)
        if is_capped:
            NUMBA.softcap_(y, 0.1)
        return y, NUMBA.likeliest(y)

    with recording() as recorded:
        y, got = chosen()
    assert (launch_words(recorded, "linear")[PEAKS] == 0) == is_capped, "which launch looks for them"
    program = Program(recorded)
    for count in (11, 9, 1):
        got.fill_(-7)
        program.run({ROWS: {NUM_ROWS: count}})
        want = y[:count].argmax(dim=1)
        want[1:3] = NO_TOKEN
        assert got.tolist() == [*want.tolist(), *[-7] * (11 - count)]
    assert torch.equal(got[:1], chosen()[1][:1])


def launch_words(recorded: launch.Recorder, module: str) -> dict[int, int]:
    """The own words of the last launch of a module."""
    return dict.fromkeys(range(WORDS), 0) | [own for name, _, _, own in recorded.launches if name == module][-1]


def some_codes(form: tuple[int, torch.dtype | None] | str) -> GroupQuantizedWeight:
    if isinstance(form, str):
        return random_file_codes(form, 40, 256)
    levels, dtype = form
    group = 32 if levels == INT8_LEVELS else 64
    if dtype is None:
        return random_codes(levels, group, 40, 256)
    return random_packed(levels, group, 40, 256, dtype=dtype, ordered=levels == INT8_LEVELS)


@pytest.mark.aside
@pytest.mark.parametrize(
    "form",
    [
        (INT4_LEVELS, None),
        *(pytest.param((n, None), marks=pytest.mark.long) for n in (INT8_LEVELS, Q3H_LEVELS)),
        "table",
    ],
    ids=str,
)
def test_without_the_processors_own_products(
    form: tuple[int, torch.dtype | None] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers from products and choices spelled out, as on processors that have none of bytes.

    Factors are multiplied by the sums of such products, whatever computes them: one kind of factors is enough.
    """
    from sgmv_kernels.cpu_kernels import linear as linear_numba
    from sgmv_kernels.cpu_runtime.kernel_parts import compiled
    from sgmv_kernels.cpu_simd import quant_ir as simd_codes_ir

    codes, x = some_codes(form), rows(5, 256)
    packed = linear_cpu.pack_linear_cpu(codes, None, None)
    # Before anything is replaced: what is compiled here is kept on disk for everybody.
    expected = linear_cpu.linear_cpu(x, packed)
    for name in ("round8", "round8_ordered"):
        address_of(linear_cpu.MODULE, name)
    monkeypatch.setattr(simd_codes_ir, "HAS_PAIR_DOT", False)
    monkeypatch.setattr(simd_codes_ir, "HAS_BYTE_DOT", False)
    monkeypatch.setattr(simd_codes_ir, "HAS_SIGNED_DOT", False)
    monkeypatch.setattr(simd_codes_ir, "IS_ARM", False)
    monkeypatch.setattr(simd_codes_ir.SmallDot, "in_pairs", False)
    is_q3h = codes.levels == Q3H_LEVELS
    kind, unpack = ("small", linear_numba.unpack_q3h) if is_q3h else (linear_cpu.ENTRIES[codes.levels], None)
    work = linear_numba.make_linear(("table" if codes.table is not None else kind) + packed.tiles.factors, unpack)

    monkeypatch.setattr(linear_cpu, "needs_signed", lambda: False)
    own, of = compiled(work).address, "sgmv_kernels.cpu_runtime.launch.kernel_address"
    monkeypatch.setattr(of, lambda m, name: address_of(m, name) if name.startswith("round") else own)
    assert error(linear_cpu.linear_cpu(x, packed), expected.double()) < 1e-6


@pytest.mark.skipif(not (HAS_PAIR_DOT or HAS_SIGNED_DOT), reason="the processor has no products of such bytes")
@pytest.mark.parametrize(
    "form",
    [
        (INT8_LEVELS, None),
        "table",
        *(
            pytest.param(form, marks=pytest.mark.long)
            for form in ((INT8_LEVELS, torch.float32), *FILE_KINDS)
            if isinstance(form, tuple) or form.split()[0] in ("table", "int8")
        ),
    ],
    ids=str,
)
def test_bytes_by_magnitude_and_sign(
    form: tuple[int, torch.dtype | None] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors whose products of bytes may overflow; the largest of both signs do not."""
    monkeypatch.setattr(linear_cpu, "needs_signed", lambda: True)
    codes, x = some_codes(form), rows(5, 256)
    codes.codes[0], x[0], x[1] = -128 if codes.signed else 7, 1.0, -1.0
    packed = linear_cpu.pack_linear_cpu(codes, None, None)
    assert error(linear_cpu.linear_cpu(x, packed), linear_reference(x, codes, None, rounded=True)) < 1e-6


def test_stacked_codes() -> None:
    parts = [random_codes(INT4_LEVELS, 32, n, 64, seed=n) for n in (16, 5)]
    stacked = stack_codes(parts)
    assert stacked is not None
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert stack_codes([parts[0], random_codes(INT4_LEVELS, 64, 16, 64)]) is None
    assert stack_codes([parts[0], random_codes(INT8_LEVELS, 32, 16, 64)]) is None


def test_arguments_are_checked(ops: Ops) -> None:
    codes = random_codes(INT4_LEVELS, 32, 16, 64)
    packed = ops.pack_linear(codes, None)
    for bad in (rows(2, 32), rows(2, 64).double(), rows(2, 128)[:, :64], rows(1, 64)[0]):
        with pytest.raises(KernelArgumentError):
            ops.linear(bad, packed)
    with pytest.raises(KernelArgumentError, match="bias"):
        ops.pack_linear(codes, torch.zeros(15))
    with pytest.raises(KernelArgumentError, match="multiples of 32"):
        NUMBA.pack_linear(random_codes(INT4_LEVELS, 16, 16, 64), None)


RIGHT = random_codes(INT4_LEVELS, 32, 16, 64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": RIGHT.codes.float()},
        {"codes": RIGHT.codes[:, :63]},
        {"scales": RIGHT.scales.float()},
        {"scales": RIGHT.scales.bfloat16(), "minima": None, "zeros": RIGHT.scales.short()},
        {"zeros": RIGHT.scales.short()},
        {"minima": None, "zeros": RIGHT.scales.int()},
        {"minima": None, "zeros": RIGHT.scales[:1].short()},
        {"order": torch.arange(64)},
        {"order": torch.arange(63, dtype=torch.int32)},
        {"scales": RIGHT.scales[:, :0]},
        {"minima": None},
        {"minima": RIGHT.minima[:1]},
        {"levels": 8},
        {"table": torch.zeros(16, dtype=torch.int8)},
        {"table": torch.zeros(15, dtype=torch.int8), "minima": None},
        {"table": torch.zeros(16), "minima": None},
        {"steps": torch.zeros(16, 1, 2).half()},
        {"minima": RIGHT.scales.float()},
    ],
)
def test_codes_that_contradict_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(KernelArgumentError):
        replace(RIGHT, **wrong)


STEPS = random_file_codes("int4 steps", 16, 256)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": None},
        {"steps": torch.ones(16, 1, 2)},
        {"steps": torch.ones(16, 1, 1).half()},
        {"steps": torch.ones(16, 2, 2).half()},
        {"scales": RIGHT.scales.repeat(1, 4)},
        {"minima": None, "zeros": STEPS.scales.short()},
    ],
)
def test_steps_that_contradict_their_codes(wrong: dict[str, Any]) -> None:
    with pytest.raises(KernelArgumentError):
        replace(STEPS, **wrong)


def test_many_rows_through_a_bf16_copy() -> None:
    """As on processors that multiply bf16 fast: from so many rows on, and never while launches are recorded."""
    codes, x, bias = random_codes(INT4_LEVELS, 32, 40, 256), rows(9, 256), rows(1, 40, seed=2)[0]
    packed = linear_cpu.pack_linear_cpu(codes, bias, 8)
    plain = linear_cpu.pack_linear_cpu(codes, bias, None)
    assert packed.nbytes == plain.nbytes + 2 * 40 * 256
    assert torch.equal(linear_cpu.linear_cpu(x[:7], packed), linear_cpu.linear_cpu(x[:7], plain))
    wide = linear_cpu.linear_cpu(x, packed)
    assert 0 < error(wide, linear_reference(x, codes, bias, rounded=False)) < 1e-2
    assert not torch.equal(wide, linear_cpu.linear_cpu(x, plain))
    with recording() as recorded:
        linear_cpu.linear_cpu(x, packed)
    assert [kind for kind, *_ in recorded.launches] == ["linear", "linear"]


def test_the_probe_wants_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_probe, "_gain", lambda codes, wide, x: len(x) / 100)
    for gain, from_rows in ((linear_probe.GAIN, 256), (0.5, 64), (3, None)):
        monkeypatch.setattr(linear_probe, "GAIN", gain)
        assert linear_probe.measured("codes", "wide") == from_rows  # type: ignore[arg-type]


def test_the_probe_bears_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process halves the speed most of the time, for ten products at a time."""
    now = [0.0]
    done = [0]

    def product(seconds: float) -> linear_probe.Product:
        def compute(x: Tensor) -> Tensor:
            now[0] += seconds * (1 if done[0] % 15 < 5 else 2)
            done[0] += 1
            return x

        return compute

    monkeypatch.setattr(linear_probe.time, "perf_counter", lambda: now[0])
    for begun in range(15):
        done[0] = begun
        assert linear_probe.measured_amx(product(1.2), product(1.0), 8) == 16
        done[0] = begun
        assert linear_probe.measured_amx(product(1.0), product(1.2), 8) is None


def test_what_was_probed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(measurements, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(linear_probe, "features", lambda: {"amx-bf16": True})
    monkeypatch.setattr(linear_probe, "_products", lambda: ())
    monkeypatch.setattr(linear_probe, "measured", lambda *products: calls.append(1) or 128)
    asked = linear_probe.wide_rows.__wrapped__
    assert [asked(), asked(), len(calls)] == [128, 128, 1]
    (tmp_path / linear_probe.FILE).write_text("{nonsense")
    assert [asked(), len(calls)] == [128, 2]
    monkeypatch.setattr(linear_probe, "features", lambda: {"avx2": True})
    assert [asked(), len(calls)] == [None, 2]


@pytest.mark.parametrize(("told", "threads"), [("3", 3), ("4,2", 4), (" 5 ", 5), ("", None), ("many", None), ("0", 1)])
def test_all_threads_are_those_of_openmp(told: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start must not end with what OpenMP itself ignores."""
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert linear_probe.all_threads() == (threads or len(os.sched_getaffinity(0)))
