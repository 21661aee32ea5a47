"""What changes logits, through a whole engine on the tiny model: alone, in a mixed batch, preempted, and its ends."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mispredict import expect_short_answers
from tiny_engine import offline_engine

from lorasrv.config import SchedulerOptions
from lorasrv.llm import LLM
from lorasrv.outputs import Completion, FinishReason
from lorasrv.sampling.watermark import WatermarkVerdict, detect
from lorasrv.sampling_params import SamplingParams, Watermark

PROMPT = list(range(10, 30))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LOOP = replace(GREEDY, logit_bias=((50, 8.0), (51, 8.0)))
MARK = Watermark(gamma=0.4, delta=6.0, key=77)
SERVED: dict[str, Any] = {
    "options": {"watermark": MARK},
    "scheduler": SchedulerOptions(max_num_seqs=16),
    "prefix_caching": False,
}
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
        assert tight.engine.metrics.snapshot().preemptions_total > 0
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


def test_frequency_penalty_breaks_a_loop(llm: LLM) -> None:
    bias = ((50, 30.0),)
    [loop] = _ask(llm, replace(GREEDY, logit_bias=bias))
    assert set(loop.token_ids) == {50}
    [varied] = _ask(llm, replace(GREEDY, logit_bias=bias, frequency_penalty=2.0))
    assert 0 < Counter(varied.token_ids)[50] < len(varied.token_ids)


class TestMinTokens:
    END = 60

    def _run(self, llm: LLM, **fields: object) -> Completion:
        """The model wants to end at every step."""
        always = {"max_tokens": 12, "temperature": 0.0, "logit_bias": ((self.END, 100.0), (2, 90.0))}
        return _ask(llm, SamplingParams(**{**always, **fields}))[0]

    def test_ends_not_before_and_then_at_once(self, llm: LLM) -> None:
        assert len(self._run(llm, stop_token_ids=(self.END,)).token_ids) == 1
        ended = self._run(llm, stop_token_ids=(self.END,), min_tokens=7)
        assert len(ended.token_ids) == 8
        assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, self.END)
        assert not {2, self.END} & set(ended.token_ids[:7])

    def test_the_models_own_end_too(self, llm: LLM) -> None:
        fields = {"logit_bias": ((2, 100.0),)}
        assert len(self._run(llm, **fields).token_ids) == 1
        assert len(self._run(llm, min_tokens=5, **fields).token_ids) == 6

    def test_an_ignored_end_is_a_token_like_others(self, llm: LLM) -> None:
        ids = self._run(llm, min_tokens=5, ignore_eos=True, logit_bias=((2, 100.0),)).token_ids
        assert list(ids) == [2] * 12

    def test_all_of_max_tokens(self, llm: LLM) -> None:
        done = self._run(llm, min_tokens=12)
        assert (len(done.token_ids), done.finish_reason) == (12, FinishReason.LENGTH)


def test_all_but_one_banned(llm: LLM) -> None:
    bias = tuple((token, -100.0) for token in range(384) if token != 99)
    assert set(_ask(llm, replace(GREEDY, logit_bias=bias))[0].token_ids) == {99}


class TestWatermark:
    def test_is_found_with_the_servers_key_only(self, llm: LLM) -> None:
        sampling = SamplingParams(max_tokens=200, seed=1, temperature=1.2, ignore_eos=True)
        plain, marked = _ids(_ask(llm, [sampling, replace(sampling, watermark=True)]))
        assert detect(marked, MARK).verdict is WatermarkVerdict.WATERMARKED
        assert detect(marked, Watermark()).verdict is WatermarkVerdict.NOT_WATERMARKED
        assert detect(plain, MARK).verdict is WatermarkVerdict.NOT_WATERMARKED

    def test_survives_being_text(self, llm: LLM) -> None:
        sampling = SamplingParams(max_tokens=200, seed=1, temperature=1.2, ignore_eos=True, watermark=True)
        [done] = _ask(llm, sampling)
        ids = llm.tokenizer.encode(done.text, add_special_tokens=False)
        assert detect(ids, MARK).verdict is WatermarkVerdict.WATERMARKED


def test_the_read_tokenizer_is_the_models(llm: LLM, model: Path, llama_gguf: Path, corpus: list[str]) -> None:
    from lorasrv.models.loader.locate import read_tokenizer

    for path in (model, llama_gguf):
        tokenizer = read_tokenizer(str(path))
        assert [tokenizer.encode(text) for text in corpus] == [llm.tokenizer.encode(text) for text in corpus]
