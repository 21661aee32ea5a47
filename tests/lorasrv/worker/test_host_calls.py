"""What the host asks of a GPU in a step of 32 answers, counted on a device that does nothing: each call takes the
engine's thread some microseconds, whether a graph computes the step or not."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counted in Triton's interpreter", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bench_gpu_host import SPEC, DeviceCalls, launches, warmed

ROWS, CONTEXT = 32, 300


@pytest.mark.parametrize("mode", ["graph", "graph, off"])
@pytest.mark.parametrize("adapters", [0, 8])
def test_a_replayed_step_is_two_copies(mode: str, adapters: int) -> None:
    """One of ids, positions and slots, one of the tables of attention; adapters only when they or rows change."""
    with launches() as launched:
        engine = warmed(ROWS, adapters, CONTEXT, 20, mode)
        launched.clear()
        for _ in range(3):
            with DeviceCalls() as calls:
                assert len(engine.step()) == ROWS
            assert calls.count == 2
    assert not launched


def test_a_step_without_a_graph_launches_each_kernel_once() -> None:
    """Of a layer: two norms, four times shrink, linear and expand, rotation and write, attention and its reduce, SiLU;
    and one each to add what three narrow linears compute in parts."""
    with launches() as launched:
        engine = warmed(ROWS, 8, CONTEXT, 20, "eager")
        launched.clear()
        with DeviceCalls() as calls:
            assert len(engine.step()) == ROWS
    assert launched.total() <= 21 * SPEC.num_layers + 3, launched
    assert calls.count <= 18 * SPEC.num_layers + 30, calls.count
