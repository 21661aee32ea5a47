"""Base linears in AMX registers: the same bits as without them, for every format.

A processor without AMX runs these tests in a process whose kernels have it, with the instructions emulated.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_codes import FILE_KINDS, random_codes, random_file_codes, random_packed
from torch import Tensor

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_ops import linear, linear_autotune
from sgmv_kernels.cpu_ops.linear import linear_parts_cpu, pack_linear_cpu
from sgmv_kernels.cpu_runtime import amx, launch, measurements
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, recording
from sgmv_kernels.cpu_simd.quant_ir import HAS_AMX, HAS_BYTE_DOT, LANES
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS

EMULATED = "LORASRV_TEST_AMX_EMULATED"
with_amx = pytest.mark.skipif(not HAS_AMX, reason="the kernels of this process have no AMX")
COUNTS = (15, 16, 17, 24, 31, 49)


@pytest.fixture(scope="module", autouse=True)
def registers() -> Iterator[None]:
    """AMX that this process may use, emulated or real."""
    library = os.environ.get(EMULATED)
    if library is None:
        assert not HAS_AMX or amx.may_use_amx()
        yield
        return
    emulator = ctypes.CDLL(library)
    assert emulator.emulate_amx() == 0
    yield
    emulator.amx_instructions.restype = ctypes.c_long
    print("emulated instructions:", emulator.amx_instructions())


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def check_same_bits(codes: GroupQuantizedWeight, counts: tuple[int, ...] = COUNTS) -> None:
    bias = rows(1, codes.out_features, seed=2)[0]
    for own in (None, bias):
        plain = pack_linear_cpu(codes, own, None)
        by_amx = replace(plain, amx_from=16)
        for count in counts:
            x = rows(count, codes.in_features)
            expected = linear_parts_cpu(x, (plain, plain))
            assert torch.equal(linear_parts_cpu(x, (by_amx, by_amx)), expected), count


@with_amx
@pytest.mark.parametrize(("levels", "group"), [(levels, group) for levels in (4, 11, 256) for group in (64, 128)])
def test_every_format(levels: int, group: int) -> None:
    levels = {4: INT4_LEVELS, 11: Q3H_LEVELS, 256: INT8_LEVELS}[levels]
    check_same_bits(random_codes(levels, group, 50, 1536))


@with_amx
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_formats_of_files(kind: str) -> None:
    check_same_bits(random_file_codes(kind, 70, 1280), (16, 33))


@with_amx
@pytest.mark.parametrize("levels", [INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_and_orders(levels: int, dtype: torch.dtype) -> None:
    check_same_bits(random_packed(levels, 64, 33, 576, dtype=dtype, ordered=True), (16, 33))


@with_amx
@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([32, 96, 256]), st.integers(1, 66), st.integers(0, 2**31))
def test_any_shape(out: int, groups: int, group: int, count: int, seed: int) -> None:
    check_same_bits(random_codes(INT4_LEVELS, group, out, groups * group, seed), (count,))


@with_amx
def test_a_recorded_pass_takes_any_number_of_rows() -> None:
    codes = random_codes(INT4_LEVELS, 32, 200, 96)
    plain = pack_linear_cpu(codes, None, None)
    by_amx, most = replace(plain, amx_from=16), rows(48, 96)
    with recording() as recorded:
        y = linear_parts_cpu(most, (by_amx,))
    program = Program(recorded)
    for count in (48, 3, 8, 31):
        y.zero_()
        program.run({ROWS: {NUM_ROWS: count}})
        assert torch.equal(y[:count], linear_parts_cpu(most[:count], (plain,)))
        assert not y[count:].any()


@pytest.mark.parametrize("in_amx", [False, pytest.param(True, marks=with_amx)])
@pytest.mark.parametrize(("levels", "group", "inputs"), [(INT4_LEVELS, 32, 1536), (Q3H_LEVELS, 1024, 2048)])
def test_kernels_stay_in_their_scratch_memory(
    in_amx: bool, levels: int, group: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = []

    def empty(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        if name != "scratch":
            return launch.empty(name, shape, dtype)
        threads, size = shape
        guarded.append(torch.full((threads, size + 4096), 0xA5, dtype=dtype))
        return guarded[-1][:, :size]

    monkeypatch.setattr(linear, "empty", empty)
    packed = linear.pack_linear_cpu(random_codes(levels, group, 600, inputs), None, None, 16 if in_amx else None)
    for count in (1, 9, 64, 131):
        linear.linear_cpu(rows(count, inputs), packed)
        assert (guarded[-1][:, -4096:] == 0xA5).all()
    assert len(guarded) == 4


def test_threads_share_the_rows() -> None:
    """Copies of a long prompt's rows, one for each thread, would not stay in a processor's caches."""
    plain = pack_linear_cpu(random_codes(INT4_LEVELS, 64, 64, 2048), None, None)

    def scratch(packed: linear.CpuLinear) -> int:
        with recording() as recorded:
            linear_parts_cpu(rows(256, 2048), (packed,))
        return sum(held.nbytes for (name, *_), held in recorded.buffers.items() if name == "scratch")

    assert scratch(replace(plain, amx_from=16)) == scratch(plain)


@with_amx
def test_no_number_stays_in_its_row() -> None:
    codes = random_codes(INT4_LEVELS, 32, 40, 64)
    by_amx = pack_linear_cpu(codes, None, None, amx_from=16)
    x = rows(32, 64)
    whole = linear_parts_cpu(x, (by_amx,))
    x[5, 3] = float("nan")
    found = linear_parts_cpu(x, (by_amx,))
    assert found[5].isnan().all()
    assert torch.equal(found[[i for i in range(32) if i != 5]], whole[[i for i in range(32) if i != 5]])


def test_amx_is_used_where_it_is_faster_and_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(x: Tensor) -> Tensor:
        return x

    def by_amx(x: Tensor) -> Tensor:
        return x + 0

    def used_from(gains: dict[int, float], product: linear_autotune.Product = by_amx) -> int | None:
        monkeypatch.setattr(linear_autotune, "_gain", lambda plain, by_amx, x: gains[len(x) - 8])
        return linear_autotune.measured_amx(plain, product, 8)

    assert used_from({16: 1.2, 32: 1.3, 64: 1.4}) == 16
    assert used_from({16: 1.1, 32: 1.3, 64: 1.4}) == 32
    assert used_from({16: 1.2, 32: 1.1, 64: 1.4}) == 64
    assert used_from({16: 1.2, 32: 1.3, 64: 1.1}) is None
    assert used_from({16: 1.2, 32: 1.3, 64: 1.4}, lambda x: x + 1e-6) is None
    assert "AMX gives wrong results" in caplog.text


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(measurements, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(linear_autotune, "may_use_amx", lambda: True)
    monkeypatch.setattr(linear_autotune, "measured_amx", lambda *products: calls.append(1) or 32)
    asked = linear_autotune.amx_rows.__wrapped__
    assert [asked(), asked(), len(calls)] == [32, 32, 1]
    (tmp_path / linear_autotune.AMX_FILE).write_text('{"rows": null}')
    assert [asked(), len(calls)] == [None, 1]
    (tmp_path / linear_autotune.AMX_FILE).write_text('{"faster": false}')
    assert [asked(), len(calls)] == [32, 2]
    monkeypatch.setattr(linear_autotune, "may_use_amx", lambda: False)
    (tmp_path / linear_autotune.AMX_FILE).unlink()
    assert [asked(), len(calls)] == [None, 2]


def test_a_system_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "features", lambda: dict.fromkeys(amx.NEEDED_BY_AMX, True))
    asked = []

    class Refusing:
        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            return -1

    monkeypatch.setattr(amx.ctypes, "CDLL", lambda name: Refusing())
    assert not amx.may_use_amx.__wrapped__()
    assert asked == [(158, 0x1023, 18)]
    monkeypatch.setattr(amx, "features", lambda: {"avx512vnni": True})
    assert not amx.may_use_amx.__wrapped__()
    assert len(asked) == 1


WITH_AMX = """
import sys
import llvmlite.binding as llvm
from llvmlite.binding.targets import FeatureMap
known = llvm.get_host_cpu_features()
more = FeatureMap({**known, "amx-tile": True, "amx-int8": True})
llvm.get_host_cpu_features = lambda: more
from sgmv_kernels.cpu_runtime import kernel_compiler
kernel_compiler.place = lambda: None  # Another process would compile without AMX.
from sgmv_kernels.cpu_simd.quant_ir import HAS_AMX
assert HAS_AMX
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.skipif(HAS_AMX, reason="the tests above have run")
@pytest.mark.skipif(not (LANES == 16 and HAS_BYTE_DOT), reason="the kernels with AMX need AVX-512 VNNI")
def test_with_amx_emulated(tmp_path: Path) -> None:
    source, library = Path(__file__).parents[1] / "support/emulated_amx.c", tmp_path / "emulated_amx.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    asked = [__file__, "-k", "not emulated and not system and not kept", "-q", "-s", "-n0", "-p", "no:cacheprovider"]
    environment = {**os.environ, EMULATED: str(library), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", WITH_AMX, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout
    assert int(done.stdout.rpartition("emulated instructions:")[2].split()[0]) > 10_000
