"""What a speculator learns, and from whom it drafts: real drafters on requests of a scheduler without an engine."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from all_drafts import scripted
from bare_scheduler import terms_of

from adapter_store.spec import AdapterKey
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest, Request, RequestStatus
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
from lorasrv.speculation.forced_tokens import ForcedTokens
from lorasrv.speculation.prompt_lookup import Prediction, PromptLookup
from lorasrv.speculation.reply_corpus import ENTRY_BYTES, MAX_TOKENS, ReplyCorpus
from lorasrv.speculation.speculator import ASKED_TOGETHER, Speculator
from lorasrv.speculation.survival import MAX_ENTRIES, SurvivalTable
from lorasrv.speculation_params import SpeculationParams

MIA, BOB = AdapterKey("a" * 64), AdapterKey("b" * 64)
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
VOCAB = 1000
REPLY = [11, 12, 13, 14, 15, 16, 17, 18]


def asked(
    name: str = "r",
    prompt: Sequence[int] = (1,),
    answer: Sequence[int] = (),
    adapter: AdapterKey | None = MIA,
    **more: Any,
) -> Request:
    """A running request that has said `answer` so far."""
    message = EngineCoreRequest(
        RequestId(name), tuple(prompt), 100, GREEDY, terms_of(adapter), adapter_key=adapter, **more
    )
    request = Request(message, arrival_s=0.0)
    request.token_ids += answer
    request.status = RequestStatus.RUNNING
    return request


def proposal(speculator: Speculator, request: Request, most: int = 8) -> tuple[int, ...]:
    [found] = speculator.propose([DraftQuery(request, most)], 1.0)
    return found.token_ids


def say(speculator: Speculator, request: Request, *tokens: int, num_drafts: int = 0) -> None:
    request.token_ids += tokens
    speculator.observe(request, tokens, num_drafts)


def finished(speculator: Speculator, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
    request.status = status
    speculator.forget(request)


class Fixed(Drafter):
    """Always proposes the same."""

    def __init__(self, tokens: Sequence[int], name: str = "fixed") -> None:
        self.name, self._tokens, self.num_asked = name, tokens, 0

    def draft(self, ask: DraftQuery) -> Draft:
        self.num_asked += 1
        return scripted(self._tokens)


class TestWhoIsCopied:
    """An answer is drafted from those of the same adapter content and salt, and of no other."""

    @pytest.fixture
    def speculator(self) -> Speculator:
        speculator = Speculator([ReplyCorpus(1 << 20)], VOCAB)
        finished(speculator, asked(answer=REPLY, cache_salt="key:ann"))
        return speculator

    def test_its_own(self, speculator: Speculator) -> None:
        assert proposal(speculator, asked("s", answer=REPLY[:1], cache_salt="key:ann")) == tuple(REPLY[1:])
        assert proposal(speculator, asked("t", answer=REPLY[2:4], cache_salt="key:ann")) == tuple(REPLY[4:])
        assert proposal(speculator, asked("u", answer=REPLY[3:4], cache_salt="key:ann")) == ()

    @pytest.mark.parametrize(
        "other", [{"adapter": BOB}, {"adapter": None}, {"cache_salt": "key:bob"}, {"cache_salt": ""}]
    )
    def test_nobody_elses(self, speculator: Speculator, other: dict[str, Any]) -> None:
        assert proposal(speculator, asked("s", answer=REPLY[:2], **{"cache_salt": "key:ann", **other})) == ()

    @pytest.mark.parametrize("drop", [(MIA, None), (None, "key:ann")])
    def test_nothing_when_dropped(self, speculator: Speculator, drop: tuple[AdapterKey | None, str | None]) -> None:
        speculator.drop(BOB, None)
        speculator.drop(None, "key:bob")
        assert speculator.kept_bytes
        speculator.drop(*drop)
        assert (speculator.kept_bytes, proposal(speculator, asked("s", answer=REPLY[:2], cache_salt="key:ann"))) == (
            0,
            (),
        )

    @pytest.mark.parametrize(
        ("status", "remember", "is_kept"),
        [
            (RequestStatus.FINISHED_LENGTH, True, True),
            (RequestStatus.FINISHED_STOPPED, False, False),
            (RequestStatus.FINISHED_ABORTED, True, False),
            (RequestStatus.FINISHED_ERROR, True, False),
            (RequestStatus.FINISHED_TIMEOUT, True, False),
        ],
    )
    def test_only_whole_answers_that_may_be_kept(self, status: RequestStatus, remember: bool, is_kept: bool) -> None:
        speculator = Speculator([ReplyCorpus(1 << 20)], VOCAB)
        finished(speculator, asked(answer=REPLY, speculation=SpeculationParams(remember=remember)), status)
        assert bool(speculator.kept_bytes) == is_kept

    def test_the_bytes_are_bounded_by_those_used_last(self) -> None:
        most = 3 * ENTRY_BYTES + 400
        speculator = Speculator([ReplyCorpus(most)], VOCAB)
        for number in range(6):
            finished(speculator, asked(answer=REPLY, cache_salt=str(number)))
            assert 0 < speculator.kept_bytes <= most
            assert proposal(speculator, asked("s", answer=REPLY[:2], cache_salt="0")) == tuple(REPLY[2:])
            speculator.forget(asked("s", cache_salt="never kept"))
        assert proposal(speculator, asked("s", answer=REPLY[:2], cache_salt="2")) == ()

    @pytest.mark.parametrize("max_bytes", [0, 100, ENTRY_BYTES + 600, 6000])
    def test_a_small_corpus_keeps_the_newest_answers(self, max_bytes: int) -> None:
        speculator = Speculator([ReplyCorpus(max_bytes)], VOCAB)
        for number in range(90):
            finished(speculator, asked(answer=[20 + number, *REPLY]))
            assert speculator.kept_bytes <= max_bytes
        assert bool(proposal(speculator, asked("s", answer=[109]))) == (max_bytes > ENTRY_BYTES)
        assert proposal(speculator, asked("t", answer=[20])) == ()
        assert speculator.is_active, "it did not fail"

    def test_the_oldest_answers_of_a_persona_go_first(self) -> None:
        speculator = Speculator([ReplyCorpus(1 << 22)], VOCAB)
        for number in range(40):
            finished(speculator, asked(answer=[20 + number, *([500 + number] * 1023)]))
            assert speculator.kept_bytes <= 3 * 4 * MAX_TOKENS
        assert proposal(speculator, asked("s", answer=[20])) == ()
        assert proposal(speculator, asked("t", answer=[59])) == (539,) * 8


class TestOtherDrafters:
    def test_a_prompt_and_its_answer_are_searched(self) -> None:
        speculator = Speculator([PromptLookup()], VOCAB)
        request = asked(prompt=[1, 2, 3, 4, 5, 6, 7], answer=[3, 4])
        assert proposal(speculator, request, 2) == (5, 6)
        say(speculator, request, 9, 8, 3, 4)
        assert proposal(speculator, request, 2) == (9, 8), "what was said last goes before the prompt"

    def test_a_prediction_is_followed_from_its_beginning_and_found_again(self) -> None:
        speculator = Speculator([Prediction()], VOCAB)
        request = asked(answer=[11], prediction_token_ids=tuple(REPLY))
        assert proposal(speculator, request, 3) == (12, 13, 14)
        say(speculator, request, 12, 99)
        assert proposal(speculator, request) == ()
        say(speculator, request, 15, 16)
        assert proposal(speculator, request) == (17, 18)

    def test_a_grammar_says_what_must_come_and_cuts_what_must_not(self) -> None:
        class OneWay:
            error, is_over = None, False

            def forced(self) -> list[int]:
                return [4, 5]

            def num_allowed(self, tokens: Sequence[int]) -> int:
                return next((at for at, token in enumerate(tokens) if token > 50), len(tokens))

        request = asked()
        request.constraint_state = OneWay()  # type: ignore[assignment]
        assert proposal(Speculator([ForcedTokens()], VOCAB), request) == (4, 5)
        assert proposal(Speculator([Fixed([7, 51, 8])], VOCAB), request) == (7,)

    @pytest.mark.parametrize(
        ("params", "is_asked"),
        [
            (SpeculationParams(max_draft=0), False),
            (SpeculationParams(drafters=frozenset({"lookup"})), False),
            (SpeculationParams(drafters=frozenset({"corpus"})), True),
        ],
    )
    def test_only_those_that_a_request_allows(self, params: SpeculationParams, is_asked: bool) -> None:
        drafter = Fixed([1], "corpus")
        proposal(Speculator([drafter], VOCAB), asked(speculation=params))
        assert bool(drafter.num_asked) == is_asked


class TestLearning:
    def test_chances_are_learned_without_verifying_anything(self) -> None:
        """The first token of each draft is right, the second in one of four, and no step ever verifies one."""
        drafter = Fixed([5, 6, 7])
        speculator = Speculator([drafter], VOCAB)
        drafter.draft = lambda ask: Draft((5, 6, 7), ("first", "second", "third"))  # type: ignore
        for number in range(400):
            request = asked(str(number), answer=[1])
            [found] = speculator.propose([DraftQuery(request, 8)], 1.0)
            say(speculator, request, 5)
            say(speculator, request, 6 if number % 4 == 0 else 1)
            finished(speculator, request)
        first, second, third = found.survival
        assert first > 0.97
        assert second == pytest.approx(0.25, abs=0.06)
        assert third == pytest.approx(second / 2, rel=0.01), "what was never reached is as unknown as before"

    def test_a_draft_is_used_up_before_another_is_asked_for(self) -> None:
        drafter = Fixed([5, 6, 7])
        speculator, request = Speculator([drafter], VOCAB), asked(answer=[1])
        assert proposal(speculator, request) == (5, 6, 7)
        say(speculator, request, 5)
        assert (proposal(speculator, request), drafter.num_asked) == ((6, 7), 1)
        say(speculator, request, 6, 7, 8, num_drafts=2)
        assert (proposal(speculator, request), drafter.num_asked) == ((5, 6, 7), 2)

    def test_behind_a_pending_token_a_draft_is_cut(self) -> None:
        """What follows is as likely as the whole draft up to it, the pending token included."""
        drafter = Fixed([5, 6, 7])
        speculator, request = Speculator([drafter], VOCAB), asked(answer=[1])
        [known] = speculator.propose([DraftQuery(request, 8)], 1.0)
        request.num_pending_tokens = 1
        [pending] = speculator.propose([DraftQuery(request, 8)], 1.0)
        assert (pending.token_ids, pending.survival) == ((6, 7), known.survival[1:])
        request.num_pending_tokens = 0
        say(speculator, request, 5)
        assert (proposal(speculator, request), drafter.num_asked) == ((6, 7), 1)

    def test_the_likelier_of_two_drafts_wins_and_both_are_judged(self) -> None:
        good, bad = Fixed([5, 6], "good"), Fixed([8, 9], "bad")
        speculator = Speculator([bad, good], VOCAB)
        for number in range(30):
            request = asked(str(number), answer=[1])
            found = proposal(speculator, request)
            say(speculator, request, 5, 6, 1, num_drafts=2 if found == (5, 6) else 0)
        assert found == (5, 6)
        counts = speculator.accounts.by_drafter
        assert counts["bad"].accepted == 0 < counts["good"].accepted

    def test_expected_chances_are_those_that_are_found(self) -> None:
        """Each token of a draft is right as often as its evidence says, if those before it are: 0.9, 0.7, 0.4."""
        rng, right = random.Random(3), {"first": 0.9, "second": 0.7, "third": 0.4}
        drafter = Fixed([5, 6, 7])
        speculator = Speculator([drafter], VOCAB)
        drafter.draft = lambda ask: Draft((5, 6, 7), tuple(right))  # type: ignore
        said_at = Counter[int]()
        for number in range(2000):
            request = asked(str(number), answer=[1])
            drafted = len(proposal(speculator, request, rng.randint(1, 3)))
            num_right = next((at for at, share in enumerate(right.values()) if rng.random() > share), 3)
            said = (*(5, 6, 7)[:num_right], 1)[: drafted + 1]
            said_at.update(range(1, min(num_right, drafted) + 1))
            say(speculator, request, *said, num_drafts=drafted)
            finished(speculator, request)
        counts, calibration = speculator.accounts.by_drafter["fixed"], speculator.accounts.calibration
        assert (counts.accepted_at, counts.drafted_at[1]) == (said_at, 2000)
        assert (calibration.drafted.total(), calibration.accepted.total()) == (counts.drafted, counts.accepted)
        known = [tenth for tenth, count in calibration.drafted.items() if count >= 200]
        assert len(known) >= 3
        for tenth in known:
            expected, found = (
                part[tenth] / calibration.drafted[tenth] for part in (calibration.expected, calibration.accepted)
            )
            assert tenth / 10 <= expected <= tenth / 10 + 0.1
            assert found == pytest.approx(expected, abs=0.05)

    def test_adapters_differ(self) -> None:
        drafter = Fixed([5])
        speculator = Speculator([drafter], VOCAB)
        for number in range(60):
            for adapter, said in ((MIA, 5), (BOB, 9)):
                request = asked(f"{number}{said}", answer=[1], adapter=adapter)
                proposal(speculator, request)
                say(speculator, request, said)
        [mia], [bob], [new] = (
            speculator.propose([DraftQuery(asked(name, answer=[1], adapter=key), 8)], 1.0)
            for name, key in (("m", MIA), ("b", BOB), ("n", AdapterKey("c" * 64)))
        )
        assert bob.survival[0] < 0.2 < 0.4 < new.survival[0] < 0.6 < 0.8 < mia.survival[0]

    def test_the_table_is_bounded(self) -> None:
        table = SurvivalTable()
        for number in range(2 * MAX_ENTRIES):
            table.observe("d", MIA, number, was_right=True)
        assert len(table._seen) == MAX_ENTRIES

    def test_time_is_shared_in_turn(self) -> None:
        """Without time only a few requests are asked for in a step, others in the next."""
        drafter = Fixed([5])
        ticks = itertools.count()
        speculator = Speculator([drafter], VOCAB, clock=lambda: float(next(ticks)))
        asks = [DraftQuery(asked(str(number), answer=[1]), 8) for number in range(3 * ASKED_TOGETHER)]
        for now in range(1, 4):
            found = speculator.propose(asks, 0.0)
            assert sum(bool(one.token_ids) for one in found) == now * ASKED_TOGETHER
        assert drafter.num_asked == len(asks)


def test_nothing_is_kept_of_finished_requests() -> None:
    lookup, prediction = PromptLookup(), Prediction()
    speculator = Speculator([lookup, prediction, ReplyCorpus(1 << 20)], VOCAB)
    for number in range(20):
        request = asked(str(number), prompt=REPLY, answer=REPLY[:3], prediction_token_ids=tuple(REPLY))
        proposal(speculator, request)
        say(speculator, request, 14, 99, num_drafts=1)
        finished(speculator, request, RequestStatus.FINISHED_ABORTED)
    kept = (speculator._trails, speculator._proposed, lookup._texts, prediction._texts)
    assert not any(kept)
    assert not speculator.kept_bytes
