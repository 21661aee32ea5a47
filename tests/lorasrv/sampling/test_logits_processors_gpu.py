"""What changes and filters logits, on a GPU as on the CPU."""

import pytest
import torch

from lorasrv.sampling.logits_processors import SamplingMetadata, adjusted_rows
from lorasrv.sampling.sampler import sample
from lorasrv.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HISTORY = [3, 5, 5, 9, 60, 5, 7, 7, 7, 60, 12]
ASKED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.0, logit_bias=((2, -7.5), (69, 3.0)), min_tokens=99, end_token_ids=(1, 40)),
    SamplingParams(temperature=0.0, watermark=True),
    SamplingParams(temperature=0.0, fsd_alpha=0.5),
]


def test_logits_are_the_cpus() -> None:
    logits = torch.randn(len(ASKED), 70) * 3
    rows = [SamplingMetadata(params, 6, HISTORY) for params in ASKED]
    torch.testing.assert_close(adjusted_rows(logits.cuda(), rows).cpu(), adjusted_rows(logits.clone(), rows))
    assert sample(logits.cuda(), rows) == sample(logits, rows)


FILTERS = [{}, {"min_p": 0.1}, {"top_k": 40}, {"top_k": 400}, {"top_p": 0.9}, {"typical_p": 0.4, "top_p": 0.9}]


def test_draws_are_those_of_the_cpu() -> None:
    logits = torch.randn(4 * len(FILTERS), 500) * 2
    params = [SamplingParams(seed=i, **FILTERS[i % len(FILTERS)]) for i in range(len(logits))]
    rows = [SamplingMetadata(p, i, HISTORY) for i, p in enumerate(params)]
    assert sample(logits.cuda(), rows) == sample(logits, rows)
