"""The ops through every set of kernels."""

from dataclasses import replace

import pytest
import torch
from quick_interpreter import install_where_imported

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
    install_where_imported()
    from sgmv_kernels.triton_ops import attention, linear, sgmv

    for module, name in ((attention, "new_partials"), (linear, "new_planes"), (sgmv, "new_planes")):
        monkeypatch.setattr(module, name, lambda shape, **how: torch.full(shape, float("nan"), **how))
    return Ops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), "triton")


@pytest.fixture
def short_parts(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 keys, so that Triton's kernels cut short contexts as well."""
    if ops.name == "triton":
        from sgmv_kernels.triton_ops import attention
        from sgmv_kernels.triton_ops.block_sizes import attention_config

        monkeypatch.setattr(
            attention,
            "attention_config",
            lambda *key, codes: replace(attention_config(*key, codes=codes), split_tokens=64),
        )
