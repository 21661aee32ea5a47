"""Putting an engine together: what depends on the machine."""

from dataclasses import replace

import pytest
import torch

from lorasrv.config import ModelOptions
from lorasrv.engine import factory as build
from lorasrv.engine.factory import make_ops
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.spec import operations
from sgmv_kernels.cpu_ops import backend as backend_numba
from sgmv_kernels.ops import INT4_LEVELS, GroupQuantizedWeight

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bf16_linears", "free", "width", "copied"),
    [("auto", 6.0, 2048, True), ("auto", 4.0, 2048, False), ("auto", 99.0, 576, False), ("off", 99.0, 2048, False)],
)
def test_bf16_copies_are_made_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, bf16_linears: str, free: float, width: int, copied: bool
) -> None:
    """`free`: times what the copies of all layers take."""
    checkpoint = open_checkpoint("smollm2-135m")
    spec = replace(checkpoint.spec, hidden_size=width)
    needed = 2 * spec.num_layers * sum(site.in_features * sum(site.out_features) for site in spec.sites())
    assert needed == operations(spec).token
    monkeypatch.setattr(backend_numba, "wide_rows", lambda: 64)
    monkeypatch.setattr(build, "free_bytes", lambda: int(free * needed))
    ops = make_ops(ModelOptions(kernels="numba", bf16_linears=bf16_linears), spec, CPU)
    checkpoint.close()
    scales = torch.ones((32, 2), dtype=torch.float16)
    codes = GroupQuantizedWeight(torch.ones((32, 64), dtype=torch.uint8), scales, scales, INT4_LEVELS)
    plain = 32 * 64 * 5 // 8
    assert ops.pack_linear(codes, None).nbytes == plain + (2 * 32 * 64 if copied else 0)
    assert ops.pack_linear(codes, None, few_rows=True).nbytes == plain
