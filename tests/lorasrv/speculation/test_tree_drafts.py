"""Trees: drafts of several drafters are verified in one step, and what is accepted lies as if it had been alone."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from any_asks import any_asks, make_grammars
from drafted import Ask, Drafted, Said, ScriptedDrafter, guesser, mixed, oracle
from mispredict import expect_short_answers

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device_pool import DevicePool

PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
TREES = SpeculationOptions(draft_trees=True, draft_head_bytes=0)


class Forest(Drafted):
    """Three drafters that are wrong in different places."""

    def __init__(self, model: Path, library: AdapterStore, **given: object) -> None:
        self.drafters = [ScriptedDrafter(name) for name in ("one", "two", "three")]
        super().__init__(model, library, drafters=self.drafters, speculation=TREES, **given)  # type: ignore[arg-type]

    def compare_to(self, plain: Drafted, asks: list[Ask]) -> list[bool]:
        """Whether each answer is the same. A few may differ: keys of a tree are summed in another order, and where two
        tokens are nearly equally good the last bits decide."""
        want = plain.run(asks)
        for number, drafter in enumerate(self.drafters):
            drafter.answers = {rid: said.token_ids for rid, said in want.items()}
            drafter.script, drafter.rng = mixed, random.Random(number)
        got = self.run(asks)
        ends = {rid for rid in want if asks[int(rid.partition(".")[0])].abort_after is None}
        return [is_near(got[rid], want[rid]) for rid in ends]


def is_near(got: Said, want: Said) -> bool:
    """Whether the answers are equal, log-probabilities but for rounding."""
    close = [
        abs(mine.logprob - yours.logprob) < 0.1
        for mine, yours in zip(got.logprobs or (), want.logprobs or (), strict=False)
    ]
    return replace(got, logprobs=[]) == replace(want, logprobs=[]) and all(close)


@pytest.fixture(scope="module")
def plain(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    with closing(Drafted(model, library)) as drafted:
        yield drafted


@pytest.fixture(scope="module")
def forest(model: Path, library: AdapterStore) -> Iterator[Forest]:
    with closing(Forest(model, library)) as drafted:
        yield drafted


def test_answers_are_those_of_no_drafts(plain: Drafted, forest: Forest, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [0]
    copy = DevicePool.copy_slots

    def counted(self: DevicePool, moves: object, ops: object) -> None:
        moved[0] += sum(len(move.sources) for move in moves)  # type: ignore[attr-defined]
        copy(self, moves, ops)  # type: ignore[arg-type]

    monkeypatch.setattr(DevicePool, "copy_slots", counted)
    rng, grammars = random.Random(4), make_grammars(plain)
    same = [is_same for _ in range(14) for is_same in forest.compare_to(plain, any_asks(plain, rng, grammars))]
    assert sum(same) >= 0.9 * len(same) > 20
    counts = forest.scheduler.speculator.accounts.by_drafter
    assert all(count.drafted > count.accepted > 20 for count in counts.values())
    assert moved[0] > 100


def test_preempted_answers_too(plain: Drafted, model: Path, library: AdapterStore) -> None:
    given = {"pages": 28, "adapter_floor": 0.0, "max_num_batched_tokens": 64}
    with closing(Forest(model, library, **given)) as tight:
        expect_short_answers(tight.scheduler.predictor)
        asks = [Ask(PROMPT, replace(GREEDY, max_tokens=60), adapter, count=2) for adapter in (None, "one", "two")]
        assert sum(tight.compare_to(plain, asks)) >= 5
        assert tight.engine.metrics.stats().preemptions_total > 0


def test_side_branches_save_steps(plain: Drafted, model: Path, library: AdapterStore) -> None:
    """One drafter guesses, the other knows: together they are as fast as the one that knows."""
    with closing(Forest(model, library)) as forest:
        [want] = plain.run([Ask(PROMPT, GREEDY)]).values()
        scripts = (guesser, oracle, guesser)
        for drafter, script in zip(forest.drafters, scripts, strict=True):
            drafter.answers, drafter.script = {RequestId("0.0"): want.token_ids}, script
        [got] = forest.run([Ask(PROMPT, GREEDY)]).values()
        assert is_near(got, want)
        assert forest.steps <= 14
