"""Choices: greedy is the argmax, filters keep what they should, a seed fixes the text whatever shares the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from lorasrv.sampling.logits_processors import SamplingMetadata, typical
from lorasrv.sampling.sampler import draw_together, sample, sample_finite
from lorasrv.sampling_params import SamplingParams

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBS.log()


def _support(draws: int = 400, **params) -> set[int]:
    p = SamplingParams(seed=11, **params)
    return {sample(LOGITS[None], [SamplingMetadata(p, i)])[0] for i in range(draws)}


def test_greedy_is_the_argmax_at_any_tiny_temperature() -> None:
    logits = torch.randn(4, 300)
    params = [SamplingParams(temperature=t) for t in (0.0, 1e-40, 1e-6, 0.0)]
    assert sample(logits, [SamplingMetadata(p) for p in params]) == logits.argmax(-1).tolist()


def test_filters_keep_exactly_what_they_should() -> None:
    assert _support() == {0, 1, 2, 3, 4}
    assert _support(top_k=2) == {1, 3}
    assert _support(top_p=0.6) == {1, 3}
    assert _support(top_p=0.66) == {1, 3, 4}
    assert _support(min_p=0.45) == {1, 3, 4}
    assert _support(top_k=4, top_p=0.89) == {1, 3, 4}
    assert _support(top_p=1e-6) == {1}


@pytest.mark.parametrize("mass", [0.05, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_typical_is_that_of_transformers(mass: float, temperature: float) -> None:
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(3)) * 2
    want = torch.isfinite(TypicalLogitsWarper(mass)(None, logits / temperature))
    assert torch.equal(typical(torch.softmax(logits / temperature, dim=-1), mass), want)
    assert not want.all()
    sampling = SamplingParams(seed=1, typical_p=mass, temperature=temperature)
    for together in (False, True):
        for i, row in enumerate(logits[:3]):
            rows = [SamplingMetadata(sampling, count) for count in range(40)]
            many = row.expand(len(rows), -1)
            drawn = draw_together(many, rows).tolist() if together else sample(many, rows)
            assert set(drawn) <= set(want[i].nonzero()[:, 0].tolist())


def test_typical_leaves_out_what_is_too_likely_and_works_on_what_the_others_leave() -> None:
    probs = [0.4, *[0.05] * 12]
    logits = torch.tensor(probs).log()[None]
    drawn = {sample(logits, [SamplingMetadata(SamplingParams(seed=2, typical_p=0.5), i)])[0] for i in range(150)}
    assert drawn == set(range(1, 13))
    assert _support(top_k=2) == {1, 3}
    assert _support(top_k=2, typical_p=0.1) == {1}  # of 0.62 and 0.38 the first is nearer to their entropy
    assert _support(temperature=1e-5, typical_p=0.1) == {1}


def test_typical_keeps_a_token_of_any_distribution() -> None:
    for probs in ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1e-30, 1.0, 1e-38]):
        assert typical(torch.tensor(probs), 0.9).any()


def test_typical_keeps_nothing_that_is_filtered_out_already() -> None:
    """Also where what is left does not quite add up to the mass, by rounding."""
    probs = torch.softmax(torch.randn(50, 400, generator=torch.Generator().manual_seed(1)), dim=-1)
    probs[:, 300:] = 0.0
    assert torch.equal(typical(probs, 1 - 1e-9), probs > 0)


def test_typical_is_of_the_share_of_what_is_left() -> None:
    probs = torch.softmax(torch.randn(50, 40, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert torch.equal(typical(probs / 4, 0.5), typical(probs, 0.5))


def test_frequencies_follow_the_distribution() -> None:
    draws = 4000
    p = SamplingParams(seed=5, temperature=1.0)
    counts = torch.bincount(
        torch.tensor([sample(LOGITS[None], [SamplingMetadata(p, i)])[0] for i in range(draws)]), minlength=5
    )
    sigma = (PROBS * (1 - PROBS) * draws).sqrt()
    assert ((counts - PROBS * draws).abs() < 4.5 * sigma).all()


def test_temperature_sharpens() -> None:
    cold = SamplingParams(seed=5, temperature=0.05)
    assert {sample(LOGITS[None], [SamplingMetadata(cold, i)])[0] for i in range(100)} == {1}


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 5))
def test_a_seed_fixes_the_token_whatever_shares_the_batch(seed: int, row: int) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    mine = SamplingParams(seed=seed, temperature=1.3, top_p=0.95)
    alone = sample(logits[row : row + 1], [SamplingMetadata(mine, 9)])[0]
    others = SamplingParams(seed=3, temperature=2.0)
    params = [mine if i == row else others for i in range(6)]
    assert sample(logits, [SamplingMetadata(p, 9 if i == row else i) for i, p in enumerate(params)])[row] == alone


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    logits = torch.zeros(1, 2000)
    p = [SamplingParams(seed=1, top_p=0.9)]
    drawn = {sample(logits, [SamplingMetadata(p[0], i)])[0] for i in range(300)}
    assert len(drawn) > 200


FILTERS = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 40, "top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 600, "min_p": 0.05, "temperature": 2.0},
    {"top_p": 1e-6},
    {"top_p": 0.95, "typical_p": 0.4},
    {"top_k": 300, "typical_p": 0.9, "temperature": 0.6},
]


def test_rows_drawn_together_are_those_drawn_alone() -> None:
    """What a GPU does for all rows at once; with a filter both go through tokens from the likeliest on."""
    logits = torch.randn(len(FILTERS), 700) * 2
    params = [SamplingParams(seed=i, **kwargs) for i, kwargs in enumerate(FILTERS)]
    for count in range(40):
        rows = [SamplingMetadata(p, count) for p in params]
        assert draw_together(logits, rows).tolist() == sample(logits, rows)


def test_rows_drawn_together_follow_the_distribution() -> None:
    draws = 4000
    params = [SamplingParams(seed=3)] * draws
    tokens = draw_together(LOGITS.expand(draws, -1), [SamplingMetadata(p, i) for i, p in enumerate(params)])
    shares = torch.bincount(tokens, minlength=5) / draws
    torch.testing.assert_close(shares, PROBS, rtol=0, atol=0.03)


def test_rows_that_are_no_numbers_have_no_token() -> None:
    logits = torch.randn(4, 50)
    logits[1, 7], logits[3, 0] = float("nan"), float("inf")
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5)]
    got = sample_finite(logits, [SamplingMetadata(p) for p in (*params, params[0])])
    good = sample(logits[[0, 2]], [SamplingMetadata(params[0]), SamplingMetadata(params[2])])
    assert got == [good[0], None, good[1], None]
