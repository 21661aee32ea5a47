"""What is drafted follows the load by itself, and the text does not: the planner decides, with costs that are known."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from any_asks import NAMES
from drafted import VOCAB, Ask, Drafted, Script, liar, oracle

from adapter_store.store import AdapterStore
from lorasrv.memory.cost_model import StepCosts
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation.draft_counts import DraftAccounts
from lorasrv.speculation.drafter import DraftQuery
from lorasrv.speculation.proposal import Proposal

LOAD = 32
COSTS = [10e-3, 1e-3, 0.0, 0.0, 0.0, 0.0]
"""Alone a draft token must be right with a chance of 0.12, beside 31 others with one of 0.99."""
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
ASKS = [
    Ask(
        tuple(range(10 + number, 30 + number)),
        replace(GREEDY, temperature=number % 3 / 2, seed=number, logprobs=1),
        NAMES[number % len(NAMES)],
    )
    for number in range(LOAD)
]


def often_right(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    return [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in right[: ask.max_tokens]]


@pytest.fixture
def drafted(model: Path, library: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafted]:
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    with closing(Drafted(model, library)) as drafted:
        drafted.scheduler._memory.costs.step.seconds_each = COSTS
        yield drafted


def answered(drafted: Drafted, asks: Sequence[Ask], right: Sequence[list[int]], script: Script) -> tuple[object, int]:
    """Return what is said to all of them, and how many draft tokens were verified."""
    before = drafted.scheduler.speculator.accounts.by_drafter["scripted"].drafted
    drafted.drafter.answers = {RequestId(f"{number}.0"): answer for number, answer in enumerate(right)}
    said = drafted._run(asks, script, None)
    return list(said.values()), drafted.scheduler.speculator.accounts.by_drafter["scripted"].drafted - before


def noted_chances(drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[tuple[float, float]]]:
    """The gauge `min_draft_chance` after each step; the least chance of the drafts of each that had some, and what they
    had to exceed."""
    least, verified, step, observe = list[float](), list[tuple[float, float]](), drafted._step, DraftAccounts.observe

    def noted_step(*args: Any) -> None:
        step(*args)
        least.append(drafted.engine.metrics.stats().min_draft_chance)

    def noted_drafts(self: DraftAccounts, drafts: Proposal, said: Sequence[int]) -> None:
        verified.append((min(drafts.survival), drafted.scheduler.min_draft_chance))
        observe(self, drafts, said)

    monkeypatch.setattr(drafted, "_step", noted_step)
    monkeypatch.setattr(DraftAccounts, "observe", noted_drafts)
    return least, verified


def test_drafts_end_under_load_and_come_back_and_no_text_changes(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 32 requests, greedy and seeded, says the same alone with drafts as among all of them without."""
    least, verified = noted_chances(drafted, monkeypatch)
    plain = list(drafted._run(ASKS, None, None).values())
    right = [one.token_ids for one in plain]
    alone = [answered(drafted, [ask], [right[n]], often_right) for n, ask in enumerate(ASKS[:8])]
    assert [said for said, _ in alone] == [[one] for one in plain[:8]]
    assert all(count > 10 for _, count in alone[2:])
    assert least[-1] == pytest.approx(0.12, abs=0.005)
    least.clear()
    together, count = answered(drafted, ASKS, right, often_right)
    assert together == plain
    assert max(least) == pytest.approx(0.99, abs=0.005)
    assert min(chance - needed for chance, needed in verified) > 0
    assert count < 2 * LOAD, "a few beside prompts and when most have ended; alone each has more than ten"
    again, count = answered(drafted, ASKS[:1], right, often_right)
    assert (again, count > 10) == (plain[:1], True)


def test_drafts_that_are_certain_are_taken_under_any_load(drafted: Drafted) -> None:
    drafted.scheduler._memory.costs.step.seconds_each = [10e-3, 0.2e-3, 0.0, 0.0, 0.0, 0.0]
    plain = list(drafted._run(ASKS, None, None).values())
    right = [one.token_ids for one in plain]
    for _ in range(2):
        together, count = answered(drafted, ASKS, right, oracle)
        assert together == plain
    assert count > LOAD * 10


def test_a_liar_is_found_out(drafted: Drafted) -> None:
    """Its first drafts are believed; later ones only compared with what is said."""
    plain = list(drafted._run(ASKS[:4], None, None).values())
    right = [one.token_ids for one in plain]
    counts = []
    for _ in range(4):
        said, count = answered(drafted, ASKS[:4], right, liar)
        assert said == plain
        counts.append(count)
    assert counts[0] > 0 == counts[-1] == counts[-2]
    assert drafted.scheduler.speculator.accounts.by_drafter["scripted"].accepted == 0
