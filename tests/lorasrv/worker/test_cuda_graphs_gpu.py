"""A decode step of real CUDA graphs against the same steps computed without."""

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_step import StepCase, random_weights

from lorasrv.models.spec import ModelSpec
from lorasrv.worker.cuda_graphs import cuda_recorder
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.forward_batch import build_batch
from sgmv_kernels.ops import Ops

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SPEC = ModelSpec("llama", 3, 512, 1024, 8, 2, 64, 1000, 2048, 1e-5)


@pytest.mark.parametrize("quantization", ["bf16", "int8", "int4", "q3h"])
@pytest.mark.parametrize("context", [30, 700])
def test_graphs_replay_what_steps_compute(quantization: str, context: int) -> None:
    ops = Ops(CUDA, "triton")
    weights = random_weights(SPEC, ops, quantization, torch.bfloat16)
    case = StepCase(weights, ops, 7, 5, torch.bfloat16, cuda_recorder(), context)
    eager = Decoder(weights, case.memory, DecoderLimits(2048, 512, 64, torch.bfloat16, torch.bfloat16), ops)
    for adapters in (5, 3, 0, 1, 5, 0):
        step = case.step(adapters)
        got = case.steps.compute(step)
        assert got is not None
        want = eager.forward(build_batch(step, case.memory, torch.bfloat16, ops))
        error = (got[0] - want).norm() / want.norm()
        assert float(error) < 3e-2
    assert case.recorded is not None
