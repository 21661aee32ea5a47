"""Tokens that a draft model draws, and the distributions that it drew them from."""

import numpy as np
import torch

from lorasrv.outputs import RequestId
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.sampler import distribution
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import PlannedDrafts, ScheduledRequest
from lorasrv.worker.draft_rows import DraftRow, draw


def test_penalties_of_a_drafts_distribution_do_not_count_the_token_drawn_from_it() -> None:
    """Otherwise rejection sampling would accept the token too often."""
    sampling = SamplingParams(seed=1, repetition_penalty=1.5, frequency_penalty=1.0)
    rest = ((0,), None, True, sampling, 1)
    asked = PlannedDrafts(asked="model", num_asked=2)
    scheduled = ScheduledRequest(RequestId("a"), (4,), 1, *rest, history=[3, 4], drafts=asked, by_rejection=True)
    row, logits = DraftRow.of(scheduled, [5]), torch.randn(1, 40)
    wanted = distribution(logits[0], SamplingMetadata.of(row.next_scheduled()))
    draw([row], logits)
    assert len(row.token_ids) == 4
    np.testing.assert_array_equal(row.drawn_from[0], wanted)
