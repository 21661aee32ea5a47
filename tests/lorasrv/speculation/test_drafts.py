"""Answers do not depend on drafts: real engine, real pool, int4 kernels, against the same requests without drafts.

Drafters are scripted (`drafted.py`): one that is always right, one that is always wrong, and what lies between.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_asks import MARKERS, NAMES, any_asks, compiled, make_grammars
from drafted import PAGE_SIZE, SCRIPTS, Ask, Drafted, Script, guesser, liar, mixed, oracle, rude
from mispredict import expect_short_answers

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.memory.kv_cache_manager import KVCacheManager
from lorasrv.memory.request_allocator import RequestAllocator
from lorasrv.outputs import FinishReason, RequestId
from lorasrv.request import TokenConstraint
from lorasrv.sampling.draft_verification import _Path
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling_params import PLAIN_TEXT, BeamOptions, SamplingParams
from lorasrv.scheduler_output import ScheduledRequest
from lorasrv.speculation.drafters import make_drafters
from lorasrv.speculation_params import MAX_DRAFT_TOKENS, SpeculationParams
from lorasrv.text.reasoning_budget import BudgetState, ReasoningBudget
from lorasrv.text.structured_output.grammar import regex_of
from lorasrv.text.structured_output.matcher import GrammarState
from lorasrv.worker import step_rows

PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
CASES = [12, pytest.param(100, marks=pytest.mark.exhaustive)]
"""Batches for each drafter, of one to five prompts each."""


@pytest.fixture(scope="module")
def wide(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    """Room for everybody."""
    with closing(Drafted(model, library)) as drafted:
        yield drafted


@pytest.fixture(scope="module", params=["recompute", "swap"])
def tight(request: pytest.FixtureRequest, model: Path, library: AdapterStore) -> Iterator[Drafted]:
    """A pool that is too small for what it lets in, and prompts in chunks."""
    with closing(
        Drafted(model, library, pages=40, adapter_floor=0.0, preemption_mode=request.param, max_num_batched_tokens=64)
    ) as drafted:
        expect_short_answers(drafted.scheduler.predictor)
        yield drafted


@pytest.fixture(scope="module")
def grammars(wide: Drafted) -> list[TokenConstraint]:
    return make_grammars(wide)


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("name", SCRIPTS)
def test_any_drafter_gives_the_answers_of_none(
    wide: Drafted, grammars: Sequence[TokenConstraint], name: str, cases: int
) -> None:
    rng, total = random.Random(name), Counter[str]()
    for _ in range(cases):
        plain, drafted = wide.compare(any_asks(wide, rng, grammars), SCRIPTS[name])
        total += Counter(plain=plain, drafted=drafted)
    if name == "oracle":
        assert 3 * total["drafted"] < total["plain"]
    if name == "liar":
        assert total["drafted"] == total["plain"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["liar", "mixed", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("oracle", "guesser", "rude"))],
)
def test_preempted_answers_too(tight: Drafted, grammars: Sequence[TokenConstraint], name: str) -> None:
    rng = random.Random(name)
    for _ in range(2):
        asks = any_asks(tight, rng, grammars, most=4)
        asks += [
            Ask(PROMPT, replace(GREEDY, max_tokens=90, temperature=t, seed=5), adapter=adapter, count=2)
            for t, adapter in ((0.0, None), (0.9, None), (0.0, "one"), (1.0, "two"))
        ]
        before = tight.engine.metrics.stats().preemptions_total
        tight.compare(asks, SCRIPTS[name])
        assert tight.engine.metrics.stats().preemptions_total > before


def _predicted(ask: Ask, text: str) -> Ask:
    """The same with a prediction of its text that goes wrong in the middle."""
    half = len(text) // 2
    guess = SpeculationParams(prediction=f"{text[:half]}?{text[half:]}")
    return replace(ask, options={**ask.options, "speculation": guess})


def test_real_drafters_give_the_answers_of_none(
    model: Path, library: AdapterStore, grammars: Sequence[TokenConstraint]
) -> None:
    """Asked twice, so that the corpus knows the answers, then with predictions."""
    rng, drafters = random.Random(7), make_drafters(SpeculationOptions())
    with closing(Drafted(model, library)) as none, closing(Drafted(model, library, drafters=drafters)) as real:
        for number in range(8):
            asks = any_asks(none, rng, grammars)
            plain = none.run(asks)
            texts = [plain[RequestId(f"{place}.0")].text for place in range(len(asks))]
            predicted = [_predicted(ask, text) for ask, text in zip(asks, texts, strict=True)]
            for those in (asks, asks, predicted):
                again = real.run(those, salt=f"{number}")
                for rid, want in plain.items():
                    if asks[int(rid.partition(".")[0])].abort_after is None:
                        assert again[rid] == want
        counts = real.scheduler.speculator.accounts.by_drafter
        assert {name for name, count in counts.items() if count.accepted} == {drafter.name for drafter in drafters}
        assert all(count.drafted > count.accepted for name, count in counts.items() if name != "grammar")


def test_the_right_drafts_save_the_steps_that_they_can(model: Path, library: AdapterStore) -> None:
    """40 tokens: the first with the prompt, 39 others in steps of 17."""
    with closing(Drafted(model, library)) as drafted:
        assert drafted.compare([Ask(PROMPT, GREEDY)], oracle) == (40, 1 + 3)
        assert drafted.compare([Ask(PROMPT, GREEDY)], liar) == (40, 40)


def test_no_more_draft_rows_than_logits_have_room_for(model: Path, library: AdapterStore) -> None:
    """Eight slots are eight rows of logits: a single answer has seven drafts at most, eight of them none."""
    with closing(Drafted(model, library, max_num_seqs=8, max_num_batched_tokens=16)) as drafted:
        assert drafted.compare([Ask(PROMPT, replace(GREEDY, max_tokens=33))], oracle)[1] == 2 + 32 / 8
        drafted.drafter.num_proposed = 0
        steps = drafted.compare([Ask(PROMPT, replace(GREEDY, max_tokens=9), count=8)], oracle)
        assert (steps[1], drafted.drafter.num_proposed) == (steps[0], 0)


class TestEnds:
    """An answer ends at its token, wherever in the window of drafts that stands."""

    @pytest.mark.parametrize(
        "at",
        [
            pytest.param(at, marks=() if at < 3 or at == 8 or at >= MAX_DRAFT_TOKENS - 1 else pytest.mark.exhaustive)
            for at in range(MAX_DRAFT_TOKENS + 3)
        ],
    )
    def test_at_every_place(self, wide: Drafted, at: int) -> None:
        [said] = wide.run([Ask(PROMPT, replace(GREEDY, temperature=1.0, seed=3, logprobs=2))]).values()
        ids = said.token_ids
        first = ids.index(ids[at])
        base = replace(GREEDY, temperature=1.0, seed=3, logprobs=2)
        ended = [
            replace(base, stop_token_ids=(ids[at],)),
            replace(base, max_tokens=at + 1),
            replace(base, stop_token_ids=(ids[at],), min_tokens=min(at, 30)),
            replace(base, stop=(said.text[: said.text_offsets[at] + 1][-2:] or "q",)),
        ]
        for number, sampling in enumerate(ended):
            # Drafts that know what would have come behind the end.
            wide.drafter.answers = {RequestId("0.0"): ids}
            plain = wide.run([Ask(PROMPT, sampling)])
            drafted = wide.run([Ask(PROMPT, sampling)], oracle)
            assert drafted == plain
            if number == 0:
                assert drafted[RequestId("0.0")].finish is FinishReason.STOP
                assert drafted[RequestId("0.0")].usage == (len(PROMPT), first + 1)

    def test_the_end_of_the_model_itself(self, wide: Drafted) -> None:
        eos = min(wide.built.spec.eos_token_ids)
        for bias in (2.0, 4.0, 6.0):
            sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=8, logit_bias=((eos, bias),))
            longer = wide.run([Ask(PROMPT, replace(sampling, ignore_eos=True))])
            wide.drafter.answers = {rid: said.token_ids for rid, said in longer.items()}
            plain = wide.run([Ask(PROMPT, sampling)])
            assert wide.run([Ask(PROMPT, sampling)], oracle) == plain
            assert plain[RequestId("0.0")].finish is FinishReason.STOP


def test_grammars_are_followed_along_the_drafts(wide: Drafted, grammars: Sequence[TokenConstraint]) -> None:
    for number, grammar in enumerate(grammars):
        asks = [
            Ask(PROMPT, SamplingParams(max_tokens=60, temperature=t, seed=number), constraint=grammar)
            for t in (0.0, 0.8, 1.3)
        ]
        for script in (oracle, mixed, guesser):
            steps = wide.compare(asks, script)
        assert wide.compare(asks, oracle)[1] < steps[0] / 2


def test_budgets_are_kept_along_the_drafts(wide: Drafted) -> None:
    markers, tokenizer = MARKERS[0], wide.tokenizer
    [words] = compiled(wide, [markers.in_front_of(regex_of("(ab|cd|ef){3,9}", "regex"), tokenizer, is_open=True)])
    end = tokenizer.encode_behind(markers.end)
    for grammar, ends in ((None, {"ignore_eos": True, "min_tokens": 60}), (words, {})):
        asks = [
            Ask(PROMPT, SamplingParams(max_tokens=60, temperature=t, seed=limit, **ends), constraint=budget)
            for limit in (0, 1, 7, 20)
            for t in (0.0, 1.3)
            for budget in [ReasoningBudget(markers, True, limit, tokenizer, PLAIN_TEXT, grammar)]
        ]
        for script in (oracle, mixed, guesser):
            wide.compare(asks, script)
        for ask, said in zip(asks, wide.run(asks).values(), strict=True):
            limit = ask.constraint.num_tokens
            assert said.token_ids[limit : limit + len(end)] == end
            assert said.error is None
            assert grammar is None or re.fullmatch("(ab|cd|ef){3,9}", said.text.partition(markers.end)[2].strip("\n"))


def test_a_kept_prefix_was_said(wide: Drafted) -> None:
    """A prompt that goes on from an answer finds its pages; they hold what was said, not what was guessed."""
    for script in (oracle, liar, mixed, rude):
        salt = f"prefix {script.__name__}"
        wide.drafter.answers = {}
        [said] = wide.run([Ask(PROMPT, replace(GREEDY, max_tokens=50))]).values()
        wide.drafter.answers = {RequestId("0.0"): said.token_ids}
        assert wide.run([Ask(PROMPT, replace(GREEDY, max_tokens=50))], script, salt) == {RequestId("0.0"): said}
        longer = (*PROMPT, *said.token_ids, 7, 8, 9)
        before = wide.engine.metrics.stats().cached_tokens_total
        got = wide.run([Ask(longer, replace(GREEDY, logprobs=3))], salt=salt)
        assert wide.engine.metrics.stats().cached_tokens_total - before == 64
        assert got == wide.run([Ask(longer, replace(GREEDY, logprobs=3))])


def test_beams_have_no_drafts_and_say_the_same_beside_those_that_have(wide: Drafted) -> None:
    def asks() -> list[Ask]:
        beams = {"beams": BeamOptions(3)}
        of_beams = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return [Ask(PROMPT, of_beams, count=3, options=beams), Ask(PROMPT, replace(GREEDY, logprobs=1), adapter="one")]

    drafted_for = set()

    def noted(right: list[int], ask: Any, rng: random.Random) -> Sequence[int]:
        drafted_for.add(ask.request.request_id)
        return oracle(right, ask, rng)

    wide.compare(asks(), noted)
    assert drafted_for == {"1.0"}


def test_nothing_is_kept_of_a_request_that_has_ended(wide: Drafted) -> None:
    wide.drafter.heard.clear()
    wide.drafter.forgotten.clear()
    said = wide.run([Ask(PROMPT, GREEDY), Ask(PROMPT, GREEDY, abort_after=3), Ask(PROMPT, GREEDY, count=2)], mixed)
    assert sorted(wide.drafter.forgotten) == sorted(said)
    for rid, heard in wide.drafter.heard.items():
        assert heard[: len(said[rid].token_ids)] == said[rid].token_ids


def test_only_said_tokens_are_charged(wide: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts, counters = Counter[str](), wide.scheduler.counters
    charge, serve = wide.scheduler.quotas.charge, wide.scheduler.policy.on_computed

    def noted_charge(request: Any, num_tokens: int) -> None:
        accounts[f"charged to {request.request_id}"] += num_tokens
        charge(request, num_tokens)

    def noted_served(request: Any, num_generated: int) -> None:
        accounts[f"served to {request.request_id}"] += num_generated
        serve(request, num_generated)

    def accounted(script: Script | None) -> tuple[dict[str, int], int]:
        accounts.clear()
        before = counters.generated_tokens
        said = wide.run(asks, script)
        if script is None:
            wide.drafter.answers = {rid: one.token_ids for rid, one in said.items()}
        return dict(accounts), counters.generated_tokens - before

    monkeypatch.setattr(wide.scheduler.quotas, "charge", noted_charge)
    monkeypatch.setattr(wide.scheduler.policy, "on_computed", noted_served)
    asks = [Ask(PROMPT, GREEDY), Ask(PROMPT, replace(GREEDY, temperature=1.0, seed=1), "two"), Ask(PROMPT[:3], GREEDY)]
    want = accounted(None)
    for script in SCRIPTS.values():
        assert accounted(script) == want


class TestFaults:
    @pytest.mark.parametrize("method", ["draft", "observe", "forget"])
    def test_a_drafter_that_fails_costs_no_answer(self, model: Path, library: AdapterStore, method: str) -> None:
        def failing(*_: object) -> Any:
            raise RuntimeError("as asked")

        with closing(Drafted(model, library)) as drafted:
            want = drafted.run([Ask(PROMPT, GREEDY, count=2)])
            setattr(drafted.drafter, method, failing)
            assert drafted.run([Ask(PROMPT, GREEDY, count=2)], oracle) == want
            assert not drafted.scheduler.speculator.is_active

    def test_a_step_that_fails_is_computed_without_drafts_first(
        self, wide: Drafted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, parts = wide.runner.run, []

        def failing(step: Any) -> Any:
            parts.append(step.num_guessed_tokens)
            if step.num_guessed_tokens:
                raise RuntimeError("as asked")
            return run(step)

        monkeypatch.setattr(wide.runner, "run", failing)
        failed = wide.engine.metrics.stats().requests_failed_total
        wide.compare([Ask(PROMPT, replace(GREEDY, max_tokens=12), count=3)], oracle)
        assert sum(map(bool, parts)) == 11
        assert wide.engine.metrics.stats().requests_failed_total == failed

    @pytest.mark.parametrize("num_failing", [1, 4])
    def test_a_request_without_a_token_is_computed_without_drafts_first(
        self, wide: Drafted, monkeypatch: pytest.MonkeyPatch, num_failing: int
    ) -> None:
        """A draft token whose numbers are NaN spoils the row of the last known token too."""
        run, steps = wide.runner.run, []

        def failing(step: Any) -> Any:
            output = run(step)
            spoilt = [s.request_id for s in step.requests if s.draft_token_ids][:num_failing]
            steps.append(len(spoilt))
            return replace(output, sampled={rid: t for rid, t in output.sampled.items() if rid not in spoilt})

        monkeypatch.setattr(wide.runner, "run", failing)
        failed = wide.engine.metrics.stats().requests_failed_total
        wide.compare([Ask(PROMPT, GREEDY, adapter) for adapter in NAMES], oracle)
        assert sum(steps) == 4, "each request once: it has no drafts any more"
        assert wide.engine.metrics.stats().requests_failed_total == failed

    def test_no_memory_for_drafts(self, wide: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
        run = wide.runner.run

        def failing(step: Any) -> Any:
            if step.num_tokens > 20:
                raise MemoryError("as asked")
            return run(step)

        monkeypatch.setattr(wide.runner, "run", failing)
        wide.compare([Ask(PROMPT, GREEDY, adapter) for adapter in NAMES], oracle)
        wide.engine.retrier._most_tokens = None

    def test_rows_of_no_numbers_matter_on_the_path_only(self, wide: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rows of rejected drafts may hold anything; a row that is reached fails the request as it would alone."""
        decoder = wide.runner._decoder
        forward = decoder.forward
        spoilt_rows: list[int] = []

        def spoilt(batch: Any) -> torch.Tensor:
            logits = forward(batch).clone()
            decoder._likeliest = None  # it is looked for in these
            [scheduled] = batch.sampled
            position = scheduled.start + scheduled.num_known_tokens - 1
            for row in range(scheduled.num_logit_rows):
                if (position + row >= len(PROMPT) + 9) == on_path and (row or on_path):
                    logits[row] = torch.nan
                    spoilt_rows.append(row)
            return logits

        monkeypatch.setattr(decoder, "forward", spoilt)
        on_path = False
        wide.compare([Ask(PROMPT, replace(GREEDY, max_tokens=9))], liar)
        assert spoilt_rows
        on_path = True
        wide.compare([Ask(PROMPT, GREEDY)], oracle)
        [said] = wide.run([Ask(PROMPT, GREEDY)], oracle).values()
        assert (said.finish, len(said.token_ids)) == (FinishReason.ERROR, 10)


class TestRoom:
    def test_nothing_makes_room_for_a_guess(self, model: Path, library: AdapterStore) -> None:
        """Prefix pages that rest fill the pool: plain tokens may take them, drafts may not."""
        with closing(Drafted(model, library, pages=24)) as drafted:

            def fill(numbers: range) -> None:
                for number in numbers:
                    prompt = tuple(40 + (number + i) % 300 for i in range(100))
                    drafted.run([Ask(prompt, replace(GREEDY, max_tokens=1))], salt="filler")
                assert drafted.scheduler._memory.num_free <= 2

            fill(range(4))
            plain = drafted.run([Ask(PROMPT, GREEDY)])
            drafted.drafter.answers = {rid: said.token_ids for rid, said in plain.items()}
            fill(range(4, 8))
            assert drafted.scheduler._memory.num_unused_prefix_pages >= 20
            before = drafted.engine.metrics.stats()
            assert drafted.run([Ask(PROMPT, GREEDY)], oracle) == plain
            after = drafted.engine.metrics.stats()
            pages = -(-(len(PROMPT) + GREEDY.max_tokens - 1) // PAGE_SIZE)
            assert after.prefix_evictions_total - before.prefix_evictions_total <= pages
            assert after.preemptions_total == before.preemptions_total

    def test_a_target_for_the_time_of_steps_holds_for_drafts(self, model: Path, library: AdapterStore) -> None:
        """No step is as short as that: answers have their tokens, and no drafts."""
        with closing(Drafted(model, library, target_itl_ms=1e-3)) as drafted:
            assert drafted.compare([Ask(PROMPT, GREEDY)], oracle) == (40, 40)


# What makes it work, taken away: what is replaced, and by what, given the original.


def _row_after(field: str, of: Callable[[ScheduledRequest], object]) -> tuple[object, str, Callable[[Any], Any]]:
    """Give the row of a further draft a field that is wrong."""
    return (
        SamplingMetadata,
        "after",
        lambda real: staticmethod(lambda scheduled, *rest: real(scheduled, *rest)._replace(**{field: of(scheduled)})),
    )


def _agrees(goes_on: Any) -> Any:
    def blind(path: _Path, token: int | None) -> bool:
        drafts, at = path.scheduled.draft_token_ids, len(path.tokens)
        return goes_on(path, drafts[at] if at < len(drafts) else token)

    return blind


def _keeps_eagerly(keep: Any) -> Any:
    def eager(kv: KVCacheManager, request_id: RequestId, token_ids: Sequence[int], num_computed: int) -> None:
        keep(kv, request_id, token_ids, min(num_computed + 1, kv.num_writable_tokens(request_id)))

    return eager


def _shifts(rows_of: Any) -> Any:
    def shifted(scheduled: Any, ends: Any, samples: Any) -> Any:
        rows = rows_of(scheduled, ends, samples)
        return rows if len(rows) == samples.sum() else rows - 1

    return shifted


SABOTAGE: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "accepts anything": (_Path, "goes_on_with", _agrees),
    "keeps pages": (RequestAllocator, "truncate_drafts", lambda _: lambda *_: None),
    "draws the first one's chance": _row_after("num_generated", lambda scheduled: scheduled.num_generated),
    "forgets the path": _row_after("history", lambda scheduled: scheduled.history),
    "stands still in the grammar": _row_after("constraint", lambda scheduled: scheduled.constraint),
    "follows the scheduler's own grammar": (GrammarState, "copy", lambda _: lambda state: state),
    "follows the scheduler's own budget": (BudgetState, "copy", lambda _: lambda state: state),
    "offers the token that is not computed yet": (KVCacheManager, "cache_full_pages", _keeps_eagerly),
    "takes the last row's logits": (step_rows, "_logit_rows", _shifts),
    "charges ahead": (
        ScheduledRequest,
        "num_known_tokens",
        lambda _: property(lambda scheduled: len(scheduled.token_ids)),
    ),
}


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_without_its_parts_it_fails(
    model: Path,
    library: AdapterStore,
    grammars: Sequence[TokenConstraint],
    sabotage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Drafted(model, library)) as drafted:
        owner, name, of = SABOTAGE[sabotage]
        monkeypatch.setattr(owner, name, of(getattr(owner, name)))
        with pytest.raises(AssertionError):
            _is_right(drafted, grammars)


def _is_right(drafted: Drafted, grammars: Sequence[TokenConstraint]) -> None:
    """Raises: AssertionError: an answer depends on drafts, or the accounts do not add up."""
    rng = random.Random(1)
    for number in range(40):
        drafted.compare(any_asks(drafted, rng, grammars), mixed)
        if number == 2:
            test_a_kept_prefix_was_said(drafted)
