"""The ops through every set of kernels."""

import pytest
import torch

from sgmv_kernels.ops import Ops


@pytest.fixture(params=("torch", "numba"))
def ops(request: pytest.FixtureRequest) -> Ops:
    """The ops through each set of the CPU's kernels, or through the set that a test names."""
    if request.param == "triton":
        return request.getfixturevalue("triton_ops")
    return Ops(torch.device("cpu"), request.param)


@pytest.fixture
def triton_ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    """Triton's kernels, compiled on a CUDA device, else interpreted; what they read of their intermediate results
    without having written it shows as NaN.
    """
    pytest.importorskip("triton")
    from sgmv_kernels.triton_ops import attention, linear, sgmv

    for module, name in ((attention, "new_partials"), (linear, "new_planes"), (sgmv, "new_planes")):
        monkeypatch.setattr(module, name, lambda shape, **how: torch.full(shape, float("nan"), **how))
    return Ops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), "triton")
