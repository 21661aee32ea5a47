"""Rejection sampling: whatever the drafts, tokens come as often as without them; a wrong rule is noticed."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lorasrv.outputs import RequestId
from lorasrv.sampling import rejection
from lorasrv.sampling.draft_verification import choose_tokens
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.rejection import DrawnToken, accept_or_draw
from lorasrv.sampling.sampler import distribution
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import PlannedDrafts, ScheduledRequest
from lorasrv.speculation.proposal import Chain, Proposal
from sgmv_kernels.metadata.draft_trees import depths_of

pytestmark = pytest.mark.aside

VOCAB, DRAWS = 12, 12_000
MIX = np.random.default_rng(5)
P, Q = MIX.dirichlet(np.ones(VOCAB)), MIX.dirichlet(np.ones(VOCAB))
Floats = npt.NDArray[np.float64]


def deviation(counts: Floats, probs: Floats) -> float:
    """Chi-square as standard deviations of a normal number; cells of fewer than ten draws are put together."""
    wanted, cells, want, got = counts.sum() * probs.ravel(), [], 0.0, 0.0
    for expected, count in zip(wanted, counts.ravel(), strict=True):
        want, got = want + expected, got + count
        if want >= 10:
            cells.append((got - want) ** 2 / want)
            want = got = 0.0
    freedom = len(cells) - 1
    return ((sum(cells) / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def draws(width: int, drafted: Floats | None, count: int = DRAWS) -> Floats:
    """How often each token comes, with so many drafts drawn one after the other; None: chosen ones."""
    rng, counts = np.random.default_rng(1), np.zeros(VOCAB)
    for number in range(count):
        tokens = np.arange(width) if drafted is None else rng.choice(VOCAB, width, replace=False, p=drafted)
        counts[accept_or_draw(P, [DrawnToken(int(t), drafted) for t in tokens], number, 3)] += 1
    return counts


@pytest.mark.parametrize("drafted", [Q, P, None], ids=["another model", "the same", "chosen"])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_the_result_is_distributed_as_the_model_says(width: int, drafted: Floats | None) -> None:
    assert abs(deviation(draws(width, drafted), P)) < 4


def test_without_drafts_it_is_the_models_too() -> None:
    assert abs(deviation(draws(0, None), P)) < 4


def test_a_draft_of_the_same_distribution_is_always_taken() -> None:
    for number in range(300):
        token = int(MIX.choice(VOCAB, p=P))
        assert accept_or_draw(P, [DrawnToken(token, P)], number, 0) == token


@pytest.mark.parametrize("width", [1, 4])
def test_drawing_again_from_all_is_noticed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule that is often written down: after a refusal draw from p, not from what q did not cover."""
    monkeypatch.setattr(rejection.np, "maximum", lambda left, zero: np.where(left == 0.0, 0.0, P))
    assert abs(deviation(draws(width, Q, 5000), P)) > 4


# Chains of two drafts and the token behind them, through the sampler: a model that knows only the last token.

NEXT_P, NEXT_Q = (torch.tensor(MIX.dirichlet(np.full(VOCAB, 0.7), VOCAB)).log().float() for _ in range(2))
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5, "temperature": 1.4},
    {"top_p": 0.7},
    {"min_p": 0.1, "typical_p": 0.8},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": ((3, 2.0),)},
]


@cache
def after(tokens: tuple[int, ...], unseeded: SamplingParams, is_drafter: bool) -> Floats:
    """What a model says behind token 0 and others; a seed changes nothing of it."""
    row = SamplingMetadata(unseeded, len(tokens) - 1, tokens)
    return distribution((NEXT_Q if is_drafter else NEXT_P)[tokens[-1]], row)


def seeded(seed: int, unseeded: SamplingParams) -> SamplingParams:
    return replace(unseeded, seed=seed + (1 << 40))


def chain(seed: int, unseeded: SamplingParams, is_drafter: bool = True) -> tuple[list[int], list[Floats]]:
    """Two tokens drawn from a model after token 0."""
    rng, tokens, dists = np.random.default_rng(seed), [0], []
    for _ in range(2):
        dists.append(after(tuple(tokens), unseeded, is_drafter))
        tokens.append(int(rng.choice(VOCAB, p=dists[-1])))
    return tokens[1:], dists


def verified(seed: int, unseeded: SamplingParams, is_drafter: bool = True) -> tuple[int, ...]:
    tokens, dists = chain(seed, unseeded, is_drafter)
    scheduled = ScheduledRequest(
        RequestId("r"), (0, *tokens), 0, (0,), None, True, seeded(seed, unseeded), 0, (0,), by_rejection=True,
        drafts=PlannedDrafts(tuple(tokens)),
    )  # fmt: skip
    said = choose_tokens(NEXT_P[[0, *tokens]], [scheduled], lambda _, at: dists[at])
    return said[RequestId("r")]


def verified_tree(seed: int, unseeded: SamplingParams, chosen: tuple[int, int], survival: float) -> tuple[int, ...]:
    """The same with a chain that was chosen, likelier than the drawn one or not; both as a tree."""
    tokens, dists = chain(seed, unseeded)
    tree = Proposal.merged([Chain("drawn", tokens, (0.5, 0.4)), Chain("chosen", chosen, (survival, survival - 0.1))])
    scheduled = ScheduledRequest(
        RequestId("r"), (0, *tree.token_ids), 0, (0,), None, True, seeded(seed, unseeded), 0, (0,), by_rejection=True,
        drafts=PlannedDrafts(tree.token_ids, tree.drafters, parents=tree.parents),
    )  # fmt: skip
    depths = depths_of(tree.parents)
    said = choose_tokens(
        NEXT_P[[0, *tree.token_ids]],
        [scheduled],
        lambda _, at: dists[depths[at] - 1] if tree.drafters[at] == "drawn" else None,
    )
    return said[RequestId("r")]


def joint(unseeded: SamplingParams) -> Floats:
    """Of the first two tokens, as plain decoding draws them."""
    then = [after((0, one), unseeded, is_drafter=False) for one in range(VOCAB)]
    return after((0,), unseeded, is_drafter=False)[:, None] * np.array(then)


@pytest.mark.slow
@pytest.mark.parametrize("fields", SAMPLINGS, ids=str)
def test_two_tokens_are_jointly_distributed_as_without_drafts(fields: dict[str, Any]) -> None:
    is_as_without(fields, verified)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "survival"),
    [
        (SAMPLINGS[0], 0.45),
        (SAMPLINGS[1], 0.6),
        pytest.param(SAMPLINGS[0], 0.6, marks=pytest.mark.exhaustive),
        pytest.param(SAMPLINGS[1], 0.45, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_trees_of_drawn_and_chosen_tokens_too(fields: dict[str, Any], survival: float) -> None:
    """Recursive rejection: whichever is tried first, also where both have the same token."""
    likely = int(NEXT_Q[0].argmax())
    chosen = likely, int(NEXT_Q[likely].argmin())
    is_as_without(fields, lambda seed, unseeded: verified_tree(seed, unseeded, chosen, survival))


def is_as_without(fields: dict[str, Any], said_of: Callable[[int, SamplingParams], tuple[int, ...]]) -> None:
    counts, num_accepted, unseeded = np.zeros((VOCAB, VOCAB)), 0, SamplingParams(seed=0, **fields)
    for seed in range(4000):
        said = said_of(seed, unseeded)
        num_accepted += len(said) - 1
        if len(said) == 1:
            # The next step draws the second token without drafts.
            rng = np.random.default_rng(seed + (1 << 50))
            probs = after((0, said[0]), unseeded, is_drafter=False)
            said = (*said, int(rng.choice(VOCAB, p=probs)))
        counts[said[:2]] += 1
    assert abs(deviation(counts, joint(unseeded))) < 4
    assert num_accepted > 300


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    unseeded = SamplingParams(seed=0, temperature=1.3)
    for seed in range(200):
        tokens, _ = chain(seed, unseeded, is_drafter=False)
        assert verified(seed, unseeded, is_drafter=False)[:2] == tuple(tokens)
