"""What changes logits, against transformers' processors and definitions spelled out; each row as if it were alone."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as oracle

from lorasrv.sampling import logits_processors
from lorasrv.sampling.logits_processors import SamplingMetadata, adjusted_rows, repetition
from lorasrv.sampling.sampler import sample, sample_finite
from lorasrv.sampling.watermark import green
from lorasrv.sampling_params import SamplingParams, Watermark

V = 70
PROMPT = [3, 5, 5, 9, 60]
ANSWER = [5, 7, 7, 7, 60, 12]


def _logits(rows: int = 1, seed: int = 0, size: int = V) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def _row(answer: Sequence[int] = ANSWER, constraint: object = None, **params: object) -> SamplingMetadata:
    fields = SamplingParams(**{"temperature": 0.0, **params})
    return SamplingMetadata(fields, len(answer), [*PROMPT, *answer], constraint)


def adjusted(logits: Tensor, rows: Sequence[SamplingMetadata]) -> Tensor:
    return adjusted_rows(logits.clone(), rows)


def _one(row: SamplingMetadata, logits: Tensor | None = None) -> Tensor:
    return adjusted(_logits() if logits is None else logits, [row])[0]


@dataclass
class Only:
    """A grammar that lets these tokens come; None: any."""

    tokens: frozenset[int] | None
    words: int = (V + 31) // 32

    def advance(self, token_id: int) -> None:
        raise AssertionError

    def allowed(self) -> np.ndarray | None:
        if self.tokens is None:
            return None
        bits = np.zeros(self.words * 32, dtype=np.uint32)
        bits[list(self.tokens)] = 1
        words = (bits.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        return words.view(np.int32)


class TestPenalties:
    @pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
    def test_repetition_is_that_of_transformers(self, penalty: float) -> None:
        logits = _logits()
        want = oracle.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*PROMPT, *ANSWER]]), logits.clone())
        assert torch.equal(_one(_row(repetition_penalty=penalty), logits), want[0])
        assert not torch.equal(want, logits)

    @pytest.mark.parametrize(("frequency", "presence"), [(0.4, 0.0), (0.0, 1.5), (-2.0, 0.25), (2.0, -2.0)])
    def test_frequency_and_presence_are_openais(self, frequency: float, presence: float) -> None:
        want = _logits()[0]
        for token, count in Counter(ANSWER).items():
            want[token] -= frequency * count + presence
        got = _one(_row(frequency_penalty=frequency, presence_penalty=presence))
        torch.testing.assert_close(got, want)
        assert got[3] == _logits()[0, 3], "only the prompt has it"
        assert torch.equal(_one(_row([], frequency_penalty=frequency, presence_penalty=presence)), _logits()[0])

    def test_all_of_them_in_order(self) -> None:
        """Bias before penalties, the multiplying one first, as vLLM and transformers have it; the watermark after."""
        mark = Watermark(delta=1.25)
        row = _row(logit_bias=((5, 4.0), (30, -100.0)), repetition_penalty=1.5, frequency_penalty=0.5, watermark=mark)
        want = _logits()
        want[0, 5] += 4.0
        want[0, 30] -= 100.0
        want = oracle.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[*PROMPT, *ANSWER]]), want)[0]
        for token, count in Counter(ANSWER).items():
            want[token] -= 0.5 * count
        want[green(mark, ANSWER[-1], np.arange(V, dtype=np.uint32))] += 1.25
        torch.testing.assert_close(_one(row), want)

    def test_a_long_history_counts_every_token(self) -> None:
        answer = list(np.random.default_rng(0).integers(0, V, 5000))
        got = _one(_row(answer, frequency_penalty=0.001), torch.zeros(1, V))
        want = -0.001 * torch.bincount(torch.tensor(answer), minlength=V)
        torch.testing.assert_close(got, want)

    def test_huge_logits_stay_numbers(self) -> None:
        logits = torch.tensor([[3e38, -3e38, 3e38, 0.0]])
        row = SamplingMetadata(SamplingParams(repetition_penalty=0.01, temperature=1e-5, seed=1), 1, [0, 1, 2])
        changed = adjusted(logits, [row])
        assert torch.isfinite(changed / 1e-5).all()
        assert sample_finite(logits, [row])[0] in (0, 2)


class TestBias:
    def test_is_added(self) -> None:
        want = _logits()[0]
        want[[2, 69]] += torch.tensor([-7.5, 100.0])
        assert torch.equal(_one(_row(logit_bias=((2, -7.5), (69, 100.0)))), want)

    def test_forces_forbids_and_changes_nothing_if_all_are_alike(self) -> None:
        best = int(_logits().argmax())
        assert sample(_logits(), [_row(logit_bias=((11, 100.0),))]) == [11]
        assert sample(_logits(), [_row(logit_bias=((best, -100.0),))]) != [best]
        assert sample(_logits(), [_row(logit_bias=tuple((token, -100.0) for token in range(V)))]) == [best]


class TestMinTokens:
    @pytest.mark.parametrize("left", [1, 3])
    def test_is_that_of_transformers(self, left: int) -> None:
        done = len(ANSWER)
        row = _row(min_tokens=done + left, end_token_ids=(2, 40))
        ids = torch.tensor([[*PROMPT, *ANSWER]])
        want = oracle.MinNewTokensLengthLogitsProcessor(len(PROMPT), done + left, [2, 40], "cpu")(ids, _logits())
        assert torch.equal(_one(row), want[0])
        assert want[0, 40] == -math.inf

    def test_a_grammar_at_its_end_ends_earlier(self) -> None:
        ends = {"min_tokens": 99, "end_token_ids": (2, 40)}
        assert _support(_one(_row(constraint=Only(frozenset({2, 7, 11})), **ends))) == {7, 11}
        assert _support(_one(_row(constraint=Only(frozenset({2})), **ends))) == {2}

    def test_every_token_ends(self) -> None:
        assert sample(_logits(), [_row(min_tokens=99, end_token_ids=tuple(range(V)))]) == [int(_logits().argmax())]


class TestAllowedAndBad:
    def test_only_allowed_tokens_are_left(self) -> None:
        allowed = _one(_row(allowed_token_ids=(3, 9, 69)))
        assert _support(allowed) == {3, 9, 69}
        assert torch.equal(allowed[[3, 9, 69]], _logits()[0][[3, 9, 69]])
        assert _support(_one(_row(allowed_token_ids=(2, 9), min_tokens=99, end_token_ids=(2,)))) == {9}
        assert _support(_one(_row(allowed_token_ids=(2,), min_tokens=99, end_token_ids=(2,)))) == {2}

    @given(
        words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4),
        answer=st.lists(st.integers(0, 4), max_size=6),
    )
    def test_bad_words_are_those_of_transformers(self, words: list[list[int]], answer: list[int]) -> None:
        """Within the answer: the prompt is not looked at, as in vLLM."""
        row = _row(answer, bad_words=("x",), bad_word_ids=tuple(map(tuple, words)))
        processor = oracle.NoBadWordsLogitsProcessor(words)
        want = processor(torch.tensor([answer], dtype=torch.long), _logits())
        assert torch.equal(_one(row), want[0])

    @pytest.mark.parametrize("size", range(1, 8))
    @pytest.mark.parametrize("answer", [[], [5], [5, 7], ANSWER, [5, 9, 60], [3, 5, 5, 9, 3, 5, 5], [5] * 9])
    def test_repeated_ngrams_are_those_of_transformers(self, size: int, answer: list[int]) -> None:
        logits = _logits()
        ids = torch.tensor([[*PROMPT, *answer]])
        want = oracle.NoRepeatNGramLogitsProcessor(size)(ids, logits.clone())
        assert torch.equal(_one(_row(answer, no_repeat_ngram_size=size), logits), want[0])

    def test_repeated_ngrams_give_way_if_nothing_else_is_allowed(self) -> None:
        row = _row([3], Only(frozenset({5})), no_repeat_ngram_size=2)
        assert _support(_one(row)) == {5}
        assert _support(_one(_row([3], Only(frozenset({5, 8})), no_repeat_ngram_size=2))) == {8}

    def test_bad_words_give_way_if_nothing_else_is_allowed(self) -> None:
        words = {"bad_words": ("x",), "bad_word_ids": ((3,), (9,))}
        assert _support(_one(_row(allowed_token_ids=(3, 7), **words))) == {7}
        assert _support(_one(_row(allowed_token_ids=(3, 9), **words))) == {3, 9}


class TestConstraint:
    def test_what_it_forces_comes_whatever_else_is_asked_for(self) -> None:
        others = {"allowed_token_ids": (3, 9), "bad_word_ids": ((7,),), "no_repeat_ngram_size": 1}
        ends = {"min_tokens": 99, "end_token_ids": (7,)}
        assert _support(_one(_row(constraint=Only(frozenset({7})), **others, **ends))) == {7}

    def test_it_may_allow_anything(self) -> None:
        anything = Only(None)
        assert torch.equal(_one(_row(constraint=anything)), _logits()[0])
        assert _support(_one(_row(constraint=anything, allowed_token_ids=(3, 9)))) == {3, 9}

    @given(st.frozensets(st.integers(0, V - 1), min_size=1), st.integers(0, 5))
    def test_only_what_it_allows_is_drawn(self, tokens: frozenset[int], seed: int) -> None:
        row = _row(constraint=Only(tokens), temperature=1.5, seed=seed, logit_bias=((0, 100.0), (69, 100.0)))
        assert _support(_one(row)) == tokens
        assert sample(_logits(seed=seed), [row])[0] in tokens
        kept = sorted(tokens)
        assert torch.equal(_one(_row(constraint=Only(tokens)))[kept], _logits()[0, kept])

    @pytest.mark.parametrize("words", [2, 3, 4])
    def test_its_vocabulary_may_be_padded_otherwise(self, words: int) -> None:
        tokens = frozenset({0, 33, 63})
        assert _support(_one(_row(constraint=Only(tokens, words)))) == tokens


class TestFsd:
    @pytest.mark.parametrize("ngram", [1, 2, 3, 5])
    @given(data=st.data())
    def test_what_repeats_is_what_the_paper_says(self, ngram: int, data: st.DataObject) -> None:
        history = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
        want = [_repetition_of(token, history, ngram) for token in range(5)]
        np.testing.assert_allclose(repetition(np.array(history), ngram, 5), want, rtol=1e-5)

    @pytest.mark.parametrize(("alpha", "top_k"), [(0.3, 0), (0.6, 3), (0.9, 70), (1.0, 2)])
    def test_the_choice_is_the_papers(self, alpha: float, top_k: int) -> None:
        history = [1, 2, 3, 1, 2, 4, 1, 2]
        chosen = set()
        row = SamplingMetadata(SamplingParams(temperature=0.0, fsd_alpha=alpha, fsd_ngram=3, top_k=top_k), 4, history)
        for seed in range(40):
            logits = _logits(seed=seed, size=8)
            probs = logits[0].double().softmax(-1)
            candidates = probs.argsort(descending=True)[: top_k or 6].tolist()
            scores = {c: (1 - alpha) * float(probs[c]) - alpha * _repetition_of(c, history, 3) for c in candidates}
            [token] = sample(logits, [row])
            assert scores[token] >= max(scores.values()) - 1e-6
            chosen.add(token == int(logits.argmax()))
        assert False in chosen  # it does what greedy does not

    def test_a_banned_token_is_no_candidate(self) -> None:
        row = _row(constraint=Only(frozenset({7})), fsd_alpha=1.0)
        assert sample(_logits(), [row]) == [7]  # though 7 repeats, and what is not allowed would not

    def test_a_loop_ends(self) -> None:
        logits = torch.tensor([[0.0, 2.0, 1.5, 0.0, 0.0, 0.0]])
        greedy, searching = (SamplingParams(temperature=0.0, fsd_alpha=alpha) for alpha in (0.0, 0.6))
        assert sample(logits, [SamplingMetadata(greedy, 20, [1] * 20)]) == [1]
        assert sample(logits, [SamplingMetadata(searching, 20, [1] * 20)]) == [2]


def _repetition_of(token: int, history: Sequence[int], ngram: int) -> float:
    """The definition, one token at a time: back off from the longest context that the token has followed."""
    if len(history) < ngram - 1:
        return 0.0
    score, left = 0.0, 1.0
    for length in range(ngram - 1, -1, -1):
        context = tuple(history[len(history) - length :])
        after = [history[i] for i in range(length, len(history)) if tuple(history[i - length : i]) == context]
        if token not in after:
            continue
        score += left * (0.9 * after.count(token) / (len(after) + 1) if length else after.count(token) / len(after))
        left *= 1 - 0.9
    return score


def _support(logits: Tensor) -> set[int]:
    return set(torch.isfinite(logits).nonzero()[:, 0].tolist())


class TestBatches:
    """A row is what it is alone, and nothing is done for rows that ask for nothing."""

    def test_the_given_logits_stay(self) -> None:
        logits, rows = _logits(2), [_row(), _row(repetition_penalty=2.0, logit_bias=((1, 5.0),))]
        assert not torch.equal(adjusted(logits, rows), logits)
        sample(logits, rows)
        assert torch.equal(logits, _logits(2))

    def test_rows_that_ask_for_nothing_are_not_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen, path = [], "lorasrv.sampling.sampler.adjusted_rows"
        monkeypatch.setattr(path, lambda logits, rows: seen.append(len(rows)) or logits)
        done = _row(min_tokens=len(ANSWER), end_token_ids=(2, 40))
        sample(_logits(5), [_row(), _row(presence_penalty=1.0), _row(temperature=1.0, seed=3), _row(top_k=3), done])
        assert seen == [1]

    @given(st.data())
    def test_mixed_rows_are_those_alone(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(_rows(), min_size=1, max_size=6))
        logits = _logits(len(rows), seed=data.draw(st.integers(0, 9)))
        together = adjusted(logits, rows)
        alone = torch.cat([adjusted(logits[i : i + 1], [row]) for i, row in enumerate(rows)])
        assert torch.equal(together, alone)
        assert not together.isnan().any()
        assert (together > -math.inf).any(dim=-1).all()
        tokens = sample(logits, rows)
        assert tokens == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert all(together[i, token] > -math.inf for i, token in enumerate(tokens))


def _rows() -> st.SearchStrategy[SamplingMetadata]:
    def make(fields: dict, answer: list[int], allowed: frozenset[int] | None) -> SamplingMetadata:
        if "fsd_alpha" in fields:
            fields = {**fields, "temperature": 0.0}
        constraint = Only(allowed) if allowed and fields.get("allowed_token_ids") is None else None
        fields = {**fields, "bad_words": ("x",) if fields.get("bad_word_ids") else ()}
        return _row(answer, constraint, **{"seed": 7, "end_token_ids": (2, 40), **fields})

    penalty, tokens = st.floats(-2.0, 2.0, width=32), st.integers(0, V - 1)
    bias = st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4)
    fields = st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 1e-40, 0.7, 1.0]),
            "presence_penalty": penalty,
            "frequency_penalty": penalty,
            "repetition_penalty": st.floats(0.25, 4.0, width=32),
            "no_repeat_ngram_size": st.integers(0, 4),
            "typical_p": st.sampled_from([0.2, 0.9, 1.0]),
            "top_p": st.sampled_from([0.5, 1.0]),
            "logit_bias": bias.map(lambda bias: tuple(bias.items())),
            "min_tokens": st.integers(0, 12),
            "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=5).map(tuple),
            "bad_word_ids": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
            "watermark": st.sampled_from([True, False, Watermark(0.25, 3.0, 5)]),
            "fsd_alpha": st.sampled_from([0.0, 0.4, 1.0]),
        },
    )
    return st.builds(make, fields, st.lists(tokens, max_size=10), st.none() | st.frozensets(tokens, max_size=5))


@pytest.mark.parametrize(
    "kind",
    [
        {"logit_bias": ((2, 1.0),)},
        {"repetition_penalty": 1.2},
        {"watermark": True},
        {"allowed_token_ids": (1, 2)},
        {"fsd_alpha": 0.5},
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_what_rows_need_goes_to_a_device_together(kind: dict[str, object]) -> None:
    """Each copy takes the engine's thread some microseconds."""

    def num_copies(rows: int) -> int:
        with mock.patch.object(logits_processors, "_on", wraps=logits_processors._on) as copied:
            adjusted(_logits(rows), [_row(**kind)] * rows)
        return copied.call_count

    assert num_copies(5) == num_copies(1) > 0
