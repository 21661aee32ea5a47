"""Rounding with feedback: the outputs, not the weights, stay what they were."""

import pytest
import torch
from torch import Tensor

from lorasrv.models.quantization.gptq import RANGES, output_error, round_to_outputs
from lorasrv.models.quantization.rounding import fit_range, round_asymmetric
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, Q3H_LEVELS

LEVELS = pytest.mark.parametrize("levels", [INT4_LEVELS, Q3H_LEVELS])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, inputs: int) -> Tensor:
    """As inputs of linears are: few directions hold most of them, and a few channels are large."""
    x = drawn(rows, 16, seed=1) @ drawn(16, inputs, seed=2) + 0.1 * drawn(rows, inputs, seed=3)
    x[:, ::37] *= 8
    return x


@LEVELS
@pytest.mark.parametrize("group", [32, 64])
def test_outputs_change_far_less_than_by_plain_rounding(levels: int, group: int) -> None:
    weight, x = drawn(48, 192), correlated(400, 192)
    rounded, plain = round_to_outputs(weight, x.T @ x, group, levels), round_asymmetric(weight, group, levels)
    assert (rounded.codes.levels, rounded.codes.group) == (levels, group)
    assert int(rounded.codes.codes.max()) < levels
    assert rounded.error < output_error(plain, weight, x.T @ x) / 3
    fresh = correlated(100, 192) + 0.1 * drawn(100, 192, seed=5)
    change, plain_change = (((c.dequantize() - weight) @ fresh.T).square().sum() for c in (rounded.codes, plain))
    assert change < plain_change / 2, "only what it was calibrated with"


@LEVELS
def test_the_error_is_that_of_the_outputs(levels: int) -> None:
    weight, x = drawn(48, 128), correlated(300, 128)
    rounded = round_to_outputs(weight, x.T @ x, 64, levels)
    outputs = x @ weight.T
    change = outputs - x @ rounded.codes.dequantize().T
    assert rounded.error == pytest.approx(float(change.square().sum() / outputs.square().sum()), rel=1e-3)


@LEVELS
def test_inputs_that_have_nothing_in_common_are_rounded_to_the_nearest(levels: int) -> None:
    weight = drawn(48, 128)
    rounded = round_to_outputs(weight, torch.eye(128), 64, levels).codes
    half = fit_range(weight.view(48, 2, 64), levels, RANGES).scale.float().repeat_interleave(64, dim=1) / 2
    inside = (rounded.codes > 0) & (rounded.codes < levels - 1)
    assert ((rounded.dequantize() - weight).abs() <= half * 1.01)[inside].all()


def test_an_input_that_is_always_zero_costs_nothing() -> None:
    weight, x = drawn(48, 128), correlated(300, 128)
    x[:, 7] = 0
    rounded = round_to_outputs(weight, x.T @ x, 64, INT4_LEVELS)
    assert torch.isfinite(rounded.codes.dequantize()).all()
    assert rounded.error < 0.01


def test_weights_of_one_value_stay_exact() -> None:
    rounded = round_to_outputs(torch.full((16, 64), 0.25), torch.eye(64), 64, INT4_LEVELS)
    assert ((rounded.codes.dequantize() == 0.25).all(), rounded.error) == (True, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_moments_that_are_no_numbers_are_refused(bad: float) -> None:
    moments = torch.eye(64)
    moments[3, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        round_to_outputs(drawn(16, 64), moments, 64, INT4_LEVELS)
