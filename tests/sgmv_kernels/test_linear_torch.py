"""int8 linears: exact against the rounded definition, independent rows, the fallback, and the rotation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgmv_kernels import linear_torch
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.linear_torch import (
    INT8_MAX,
    FbgemmInt8,
    PlainInt8,
    activation_levels,
    int8_linear,
    int8_linear_reference,
    pack_int8,
    rotate,
    rotation,
    unpack_int8,
    unrotate,
)

CPU = torch.device("cpu")


def weight(out: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-INT8_MAX, INT8_MAX + 1, (out, width), generator=generator).to(torch.int8)
    return values, torch.rand(out, generator=generator) * 0.01 + 1e-4


def rows(count: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_torch, "activation_levels", lambda: None)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 200), st.integers(0, 40), st.integers(0, 2**31))
def test_equals_the_definition_for_any_shape(out: int, width: int, count: int, seed: int) -> None:
    values, scales = weight(out, width, seed)
    x = rows(count, width, seed)
    y = int8_linear(x, pack_int8(values, scales))
    expected = int8_linear_reference(x, values, scales, activation_levels())
    # A number half way between two levels may fall either way in float32: at most a level of one product each.
    level = (x.abs().amax(1, keepdim=True) / (activation_levels() or 1e9)) if count else torch.zeros(0, 1)
    slack = 1e-5 * expected.abs() + 1e-5 + level * scales * INT8_MAX * 2
    assert y.shape == (count, out)
    assert ((y - expected).abs() <= slack).all()


def test_largest_products_do_not_saturate() -> None:
    """int16 sums of two uint8 x int8 products overflow silently in FBGEMM on CPUs without VNNI."""
    values = torch.full((4, 256), INT8_MAX, dtype=torch.int8)
    y = int8_linear(torch.ones(1, 256), pack_int8(values, torch.ones(4)))
    torch.testing.assert_close(y, torch.full((1, 4), 256.0 * INT8_MAX))


@pytest.mark.parametrize("width", [576, 1536])
def test_a_row_does_not_depend_on_the_rows_beside_it(width: int) -> None:
    packed, turn = pack_int8(*weight(96, width)), rotation(width, CPU)
    x = rows(33, width)
    x[5] *= 1e6
    x[6] = 0
    together = int8_linear(rotate(x, turn), packed)
    for count in (1, 2, 3, 4, 7, 16, 32):
        alone = int8_linear(rotate(x[7 : 7 + count].clone(), turn), packed)
        assert torch.equal(alone, together[7 : 7 + count])
    assert torch.equal(int8_linear(rotate(x[5:6], turn), packed)[0], together[5])


def test_zero_rows_and_zero_channels() -> None:
    values, scales = weight(8, 64)
    values[3] = 0
    x = rows(2, 64)
    x[1] = 0
    y = int8_linear(x, pack_int8(values, scales))
    assert (y[1] == 0).all()
    assert y[0, 3] == 0
    assert int8_linear(x[:0], pack_int8(values, scales)).shape == (0, 8)


def test_a_poisoned_row_stays_alone() -> None:
    x = rows(3, 64)
    x[1, 5] = float("nan")
    packed = pack_int8(*weight(8, 64))
    y = int8_linear(x, packed)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], int8_linear(x[[0, 2]], packed))


def test_plain_torch_rounds_only_weights(without_fbgemm: None) -> None:
    values, scales = weight(12, 40)
    packed = pack_int8(values, scales)
    assert isinstance(packed, PlainInt8)
    assert packed.nbytes == 12 * 40 + 12 * 4
    x = rows(5, 40)
    expected = int8_linear_reference(x, values, scales, None)
    torch.testing.assert_close(int8_linear(x, packed).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(unpack_int8(packed), values.float() * scales[:, None])


def test_packed_weights_unpack_exactly() -> None:
    values, scales = weight(24, 48)
    packed = pack_int8(values, scales)
    assert (packed.out_features, packed.in_features) == (24, 48)
    assert packed.nbytes >= values.nbytes
    assert torch.equal(unpack_int8(packed), values.float() * scales[:, None])


def test_this_machine_is_probed() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        assert activation_levels() is None
        return
    assert activation_levels() in (linear_torch.FULL_RANGE, linear_torch.HALF_RANGE)
    assert isinstance(pack_int8(*weight(8, 32)), FbgemmInt8)


def test_packing_leaves_torchs_engine_alone() -> None:
    before = torch.backends.quantized.engine
    pack_int8(*weight(8, 32))
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("n", [1, 2, 7, 24, 64, 96, 576, 1536, 97])
def test_rotation_is_orthogonal_and_undone(n: int) -> None:
    turn = rotation(n, CPU)
    x = rows(5, n)
    turned = rotate(x, turn)
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(unrotate(turned, turn), x, rtol=1e-5, atol=2e-6)
    w = rows(3, n, seed=9)
    torch.testing.assert_close(turned @ rotate(w, turn).T, x @ w.T, rtol=1e-4, atol=1e-5)


def test_rotation_spreads_outliers() -> None:
    x = rows(4, 576) * 0.01
    x[:, 100] = 50.0
    peaks = rotate(x, rotation(576, CPU)).abs().amax(1) / x.norm(dim=1)
    assert (peaks < 0.1).all()


def test_wrong_arguments_are_named() -> None:
    values, scales = weight(4, 8)
    with pytest.raises(KernelArgumentError, match="values must be int8"):
        pack_int8(values.float(), scales)
    with pytest.raises(KernelArgumentError, match="scales"):
        pack_int8(values, scales[:3])
    with pytest.raises(KernelArgumentError, match=r"x must be float32 \[T, 8\], not torch.float32 \[2, 9\]"):
        int8_linear(torch.ones(2, 9), pack_int8(values, scales))
    with pytest.raises(KernelArgumentError, match="float64"):
        int8_linear(torch.ones(2, 8, dtype=torch.float64), pack_int8(values, scales))
