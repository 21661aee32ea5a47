"""RMSNorm, rotary embedding and gated SiLU against their references."""

import torch

from sgmv_kernels import ops
from sgmv_kernels.reference import rms_norm_reference, rope_reference, silu_mul_reference


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 576) * 30, torch.randn(576)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_rope_in_place_also_on_a_view() -> None:
    wide = torch.randn(5, 3 * 64 + 10)
    x = wide[:, :192].unflatten(-1, (3, 64))
    angle = torch.rand(5, 32) * 6
    want = rope_reference(x, angle.cos(), angle.sin())
    assert ops.rope_(x, angle.cos()[:, None], angle.sin()[:, None]) is x
    torch.testing.assert_close(x, want)


def test_silu_mul() -> None:
    gate_up = torch.randn(5, 96)
    torch.testing.assert_close(ops.silu_mul(gate_up), silu_mul_reference(gate_up))
