"""Choices: greedy is the argmax, filters keep what they should, a seed fixes the text whatever shares the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mispredict import expect_short_answers
from tiny_engine import offline_engine
from transformers import TypicalLogitsWarper

from lorasrv.llm import LLM
from lorasrv.models.loader.locate import read_tokenizer
from lorasrv.outputs import Completion, FinishReason
from lorasrv.sampling import sampler
from lorasrv.sampling.logits_processors import SamplingMetadata, typical
from lorasrv.sampling.sampler import _drawn as drawn
from lorasrv.sampling.sampler import _sorted, draw_together_, launch_sampling, sample, sample_finite
from lorasrv.sampling.watermark import WatermarkVerdict, detect
from lorasrv.sampling_params import SamplingParams, Watermark
from sgmv_kernels.backend import NO_TOKEN

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBS.log()


def _draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    """What is drawn of one row at the first steps."""
    sampling = SamplingParams(**params)
    return [sample(logits[None], [SamplingMetadata(sampling, step)])[0] for step in range(count)]


def _support(count: int = 400, logits: torch.Tensor = LOGITS, **params: Any) -> set[int]:
    return set(_draws(count, logits, seed=11, **params))


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
    assert _support(100, temperature=0.05) == {1}


@pytest.mark.parametrize("mass", [0.05, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_typical_is_that_of_transformers(mass: float, temperature: float) -> None:
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(3)) * 2
    want = torch.isfinite(TypicalLogitsWarper(mass)(None, logits / temperature))
    assert torch.equal(typical(torch.softmax(logits / temperature, dim=-1), mass), want)
    assert not want.all()
    sampling = SamplingParams(seed=1, typical_p=mass, temperature=temperature)
    rows = [SamplingMetadata(sampling, count) for count in range(40)]
    for row, kept in zip(logits[:3], want[:3], strict=True):
        many = row.expand(len(rows), -1)
        assert {*together(many, rows), *sample(many, rows)} <= set(kept.nonzero()[:, 0].tolist())


def test_typical_leaves_out_what_is_too_likely_and_works_on_what_the_others_leave() -> None:
    assert _support(150, torch.tensor([0.4, *[0.05] * 12]).log(), typical_p=0.5) == set(range(1, 13))
    assert _support(top_k=2) == {1, 3}
    assert _support(top_k=2, typical_p=0.1) == {1}  # of 0.62 and 0.38 the first is nearer to their entropy
    assert _support(temperature=1e-5, typical_p=0.1) == {1}


def test_typical_is_of_the_share_of_what_is_left_and_keeps_nothing_else() -> None:
    """Also where what is left does not quite add up to the mass, by rounding."""
    probs = torch.softmax(torch.randn(50, 400, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert torch.equal(typical(probs / 4, 0.5), typical(probs, 0.5))
    probs[:, 300:] = 0.0
    assert torch.equal(typical(probs, 1 - 1e-9), probs > 0)
    for certain in ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1e-30, 1.0, 1e-38]):
        assert typical(torch.tensor(certain), 0.9).any()


def test_frequencies_follow_the_distribution() -> None:
    draws = 4000
    counts = torch.bincount(torch.tensor(_draws(draws, seed=5, temperature=1.0)), minlength=5)
    sigma = (PROBS * (1 - PROBS) * draws).sqrt()
    assert ((counts - PROBS * draws).abs() < 4.5 * sigma).all()


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 5))
def test_a_seed_fixes_the_token_whatever_shares_the_batch(seed: int, row: int) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    mine = SamplingParams(seed=seed, temperature=1.3, top_p=0.95)
    alone = sample(logits[row : row + 1], [SamplingMetadata(mine, 9)])[0]
    others = SamplingParams(seed=3, temperature=2.0)
    params = [mine if i == row else others for i in range(6)]
    assert sample(logits, [SamplingMetadata(p, 9 if i == row else i) for i, p in enumerate(params)])[row] == alone


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    assert len(set(_draws(300, torch.zeros(2000), seed=1, top_p=0.9))) > 200


FILTERS = [
    {},
    {"min_p": 0.1, "temperature": 1.5},
    {"typical_p": 0.5},
    {"top_k": 700},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 40, "top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_k": 600, "min_p": 0.05, "temperature": 2.0},
    {"top_p": 1e-6},
    {"top_p": 0.95, "typical_p": 0.4},
    {"top_k": 300, "typical_p": 0.9, "temperature": 0.6},
]


def together(logits: torch.Tensor, rows: list[SamplingMetadata]) -> list[int]:
    tokens = torch.full((len(rows),), -1)
    draw_together_(tokens, logits, rows, range(len(rows)))
    return tokens.tolist()


def test_a_few_of_the_likeliest_are_the_first_of_all_sorted() -> None:
    """Of equally likely tokens the lower number comes first, whatever method finds them."""
    probs = torch.softmax((torch.randn(3, 700) * 2).round(), dim=-1)
    probs[1, 100:] = 0.0
    for few, whole in zip(_sorted(probs, 256), _sorted(probs, 700), strict=True):
        assert torch.equal(few, whole[:, :256])


def test_rows_drawn_together_are_those_drawn_alone() -> None:
    """What a GPU does for all rows at once."""
    logits = torch.randn(len(FILTERS), 700) * 2
    params = [SamplingParams(seed=i, **kwargs) for i, kwargs in enumerate(FILTERS)]
    for count in range(40):
        rows = [SamplingMetadata(p, count) for p in params]
        assert together(logits, rows) == sample(logits, rows)


def test_the_memory_of_a_draw_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows of a large vocabulary would take gigabytes."""
    logits, counts = torch.randn(20, 700), list[int]()
    rows = [SamplingMetadata(SamplingParams(seed=i, top_p=0.9 if i % 3 else 1.0), 0) for i in range(20)]
    monkeypatch.setattr(sampler, "DRAWN_TOGETHER", 5)
    monkeypatch.setattr(sampler, "_drawn", lambda few, *rest: counts.append(len(few)) or drawn(few, *rest))
    assert together(logits, rows) == sample(logits, rows)
    assert counts == [5, 2, 5, 5, 3]


@pytest.mark.parametrize(
    ("asks", "looked_at"),
    [
        ({}, []),
        ({"min_p": 0.1, "typical_p": 0.5}, []),
        ({"top_k": 5}, [256]),
        ({"top_k": 300}, [700]),
        ({"top_p": 0.9}, [700]),
    ],
)
def test_only_what_needs_the_likeliest_sorts(
    monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any], looked_at: list[int]
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(sampler, "_sorted", lambda probs, count: counts.append(count) or _sorted(probs, count))
    together(torch.randn(2, 700), [SamplingMetadata(SamplingParams(seed=1, **asks))] * 2)
    assert counts == looked_at


def test_rows_drawn_together_follow_the_distribution() -> None:
    draws = 4000
    rows = [SamplingMetadata(SamplingParams(seed=3), i) for i in range(draws)]
    tokens = together(LOGITS.expand(draws, -1), rows)
    shares = torch.bincount(torch.tensor(tokens), minlength=5) / draws
    torch.testing.assert_close(shares, PROBS, rtol=0, atol=0.03)


def test_rows_that_are_no_numbers_have_no_token() -> None:
    logits = torch.randn(4, 50)
    logits[1, 7], logits[3, 0] = float("nan"), float("inf")
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5)]
    got = sample_finite(logits, [SamplingMetadata(p) for p in (*params, params[0])])
    one, other = sample(logits[[0, 2]], [SamplingMetadata(params[0]), SamplingMetadata(params[2])])
    assert got == [one, None, other, None]
    biased = replace(params[0], logit_bias=((3, 5.0),))
    rows = [SamplingMetadata(p) for p in (params[0], biased, biased, params[0])]
    assert launch_sampling(logits, rows).tolist() == [one, NO_TOKEN, sample(logits[2:3], rows[2:3])[0], NO_TOKEN]


# Through a whole engine: alone, in a mixed batch, preempted, and how answers end.

PROMPT = list(range(10, 30))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LOOP = replace(GREEDY, logit_bias=((50, 8.0), (51, 8.0)))
MARK = Watermark(gamma=0.4, delta=6.0, key=77)
SERVED: dict[str, Any] = {"watermark": MARK, "max_num_seqs": 16, "enable_prefix_caching": False}
ASKED = [
    GREEDY,
    LOOP,
    replace(LOOP, repetition_penalty=4.0),
    replace(LOOP, presence_penalty=1.5, frequency_penalty=0.7),
    replace(LOOP, fsd_alpha=0.6),
    replace(GREEDY, watermark=True),
    SamplingParams(max_tokens=24, seed=5, typical_p=0.3, frequency_penalty=1.0, min_tokens=20),
    SamplingParams(max_tokens=24, seed=6, watermark=True, temperature=1.3, ignore_eos=True),
]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with offline_engine(model, **SERVED) as llm:
        yield llm


def _ask(llm: LLM, sampling: SamplingParams | Sequence[SamplingParams]) -> list[Completion]:
    count = 1 if isinstance(sampling, SamplingParams) else len(sampling)
    return llm.generate([PROMPT] * count, sampling)


def _ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(c.token_ids) for c in completions]


def test_a_mixed_batch_is_each_alone(llm: LLM) -> None:
    alone = [_ids(_ask(llm, sampling))[0] for sampling in ASKED]
    assert _ids(_ask(llm, ASKED)) == alone
    assert len({tuple(ids) for ids in alone}) == len(ASKED)  # every field did something


def test_preempted_and_computed_again_it_is_the_same(model: Path, llm: LLM) -> None:
    long = [replace(sampling, max_tokens=60) for sampling in ASKED]
    want = _ids(_ask(llm, long))
    with offline_engine(model, pages=20, **SERVED) as tight:
        expect_short_answers(tight.engine._parts.scheduler.predictor)
        done = _ask(tight, long)
        assert tight.engine.metrics.stats().preemptions_total > 0
    assert _ids(done) == want


def test_penalties_against_the_loop_of_a_plain_model(llm: LLM, model: Path) -> None:
    """transformers with its own processors, token by token."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    fields = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    for penalty in (1.3, 0.8):
        want = reference.generate(torch.tensor([PROMPT]), repetition_penalty=penalty, **fields)[0, len(PROMPT) :]
        got = _ask(llm, replace(GREEDY, max_tokens=16, repetition_penalty=penalty))
        assert _ids(got) == [want.tolist()]


END, EOS = 60, 2
WANTS_END = {"logit_bias": ((END, 100.0), (EOS, 90.0)), "stop_token_ids": (END,)}
WANTS_EOS = {"logit_bias": ((EOS, 100.0),)}


@pytest.mark.parametrize(
    ("fields", "length", "reason", "stop"),
    [
        (WANTS_END, 1, FinishReason.STOP, END),
        (WANTS_END | {"min_tokens": 7}, 8, FinishReason.STOP, END),
        (WANTS_END | {"min_tokens": 12}, 12, FinishReason.LENGTH, None),
        (WANTS_EOS, 1, FinishReason.STOP, None),
        (WANTS_EOS | {"min_tokens": 5}, 6, FinishReason.STOP, None),
        (WANTS_EOS | {"min_tokens": 5, "ignore_eos": True}, 12, FinishReason.LENGTH, None),
    ],
)
def test_answers_end_not_before_min_tokens_and_then_at_once(
    llm: LLM, fields: dict[str, Any], length: int, reason: FinishReason, stop: int | None
) -> None:
    """The model wants to end at every step; an end that is ignored is a token like others."""
    [done] = _ask(llm, SamplingParams(max_tokens=12, temperature=0.0, **fields))
    assert (len(done.token_ids), done.finish_reason, done.stop_reason) == (length, reason, stop)
    if "ignore_eos" in fields:
        assert list(done.token_ids) == [EOS] * 12
    else:
        assert not {EOS, END} & set(done.token_ids[: fields.get("min_tokens", 0)])


def test_a_watermark_survives_being_text_and_is_found_with_the_servers_key_only(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=200, seed=1, temperature=1.2, ignore_eos=True)
    plain, marked = _ask(llm, [sampling, replace(sampling, watermark=True)])
    as_text = llm.tokenizer.encode(marked.text, add_special_tokens=False)
    for ids, key, verdict in (
        (marked.token_ids, MARK, WatermarkVerdict.WATERMARKED),
        (as_text, MARK, WatermarkVerdict.WATERMARKED),
        (marked.token_ids, Watermark(), WatermarkVerdict.NOT_WATERMARKED),
        (plain.token_ids, MARK, WatermarkVerdict.NOT_WATERMARKED),
    ):
        assert detect(list(ids), key).verdict is verdict


def test_the_read_tokenizer_is_the_models(llm: LLM, model: Path, llama_gguf: Path, corpus: list[str]) -> None:
    for path in (model, llama_gguf):
        tokenizer = read_tokenizer(str(path))
        assert [tokenizer.encode(text) for text in corpus] == [llm.tokenizer.encode(text) for text in corpus]
