"""fp8 weights: their definition on any device, and a refusal where the device does not multiply them."""

import pytest
import torch

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.quantization import fp8, get_format
from lorasrv.models.quantization.fp8 import Fp8Format, Fp8Linear
from sgmv_kernels.formats.fp8 import E4M3_MAX, fp8_linear, quantize_fp8
from sgmv_kernels.ops import Ops

FORMAT = Fp8Format()


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)


def test_a_row_uses_the_whole_range() -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-4, 1.0, 300.0, 1e6, 0.0])[:, None]
    values, scales = quantize_fp8(x)
    assert values[:4].float().abs().amax(dim=1).tolist() == [E4M3_MAX] * 4
    # Three bits of mantissa: half a step is a sixteenth of a number, and of the smallest normal one.
    error = (values.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales * 2**-10 + 1e-30).all()
    assert not values[4].float().any()


def test_what_the_arithmetic_uses_is_what_is_told(capable: None) -> None:
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(7, 64)
    linear = FORMAT.linear(weight, bias, torch.bfloat16)
    assert isinstance(linear, Fp8Linear)
    values, scales = quantize_fp8(weight)
    assert torch.equal(linear.dequantize(), values.float() * scales)
    assert linear.nbytes == 48 * 64 + 48 * 4 + 48 * 4
    rounded, unit = quantize_fp8(x)
    want = (rounded.double() * unit) @ linear.dequantize().double().T + bias
    torch.testing.assert_close(linear(x).double(), want, rtol=1e-2, atol=1e-2)
    assert float((linear(x) - x @ weight.T - bias).norm() / (x @ weight.T).norm()) < 0.06


def test_a_row_does_not_depend_on_the_rows_beside_it_and_nan_stays_nan() -> None:
    values, scales = quantize_fp8(torch.randn(32, 64))
    x = torch.randn(4, 64)
    together = fp8_linear(x, values, scales, None)
    x[1], x[2, 3], x[3, 5] = 1e4, torch.nan, torch.inf
    y = fp8_linear(x, values, scales, None)
    assert torch.equal(y[0], together[0])
    assert y.isnan().any(dim=1).tolist() == [False, False, True, True]


def test_odd_widths_stay_floats(capable: None) -> None:
    weight = torch.randn(50, 64)
    linear = FORMAT.linear(weight, None, torch.bfloat16)
    assert torch.equal(linear.dequantize(), weight.bfloat16().float())


def test_a_device_without_e4m3_is_refused() -> None:
    assert isinstance(get_format("fp8", Ops(torch.device("cpu"), "torch")), Fp8Format)
    with pytest.raises(UnsupportedFormat, match=r"sm89 or later\), and device 'cpu' has none; choose int8 or none"):
        FORMAT.embedding(torch.zeros(4, 4), torch.bfloat16)
    with pytest.raises(UnsupportedFormat, match="--quantization fp8"):
        FORMAT.linear(torch.zeros(16, 16), None, torch.bfloat16)
