"""How likely tokens are: as transformers and PEFT say, whatever shares the batch, is cached or was preempted."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mispredict import expect_short_answers
from tiny_engine import checked_engine
from tiny_tokenizers import sentencepiece

from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.errors import InvalidRequest
from lorasrv.llm import LLM
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestTiming, TokenLogprobs
from lorasrv.sampling.logprobs import likeliest, token_logprobs
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer, _byte_alphabet
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker import model_runner

CLOSE = 2e-4
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
LONG = [10 + (7 * i) % 300 for i in range(200)]
NAMES = (None, "one", "two", "three")
Oracle = Callable[[list[int], str | None], torch.Tensor]


@pytest.fixture(scope="module")
def oracle(model: Path, adapter_dirs: dict[str, Path]) -> Oracle:
    """oracle(tokens, adapter): log-softmax [T, V] of transformers and PEFT, in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def logprobs(tokens: list[int], name: str | None) -> torch.Tensor:
        base = AutoModelForCausalLM.from_pretrained(model).eval()
        chosen = base if name is None else PeftModel.from_pretrained(base, adapter_dirs[name]).eval()
        with torch.inference_mode():
            return chosen(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


@pytest.fixture
def llm(model: Path, adapter_dirs: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A small engine; parametrized by pages of the pool, tokens a step and the way of preemption."""
    pages, tokens, mode = getattr(request, "param", (400, 512, "auto"))
    options = {"max_num_seqs": 16, "max_num_batched_tokens": tokens, "preemption_mode": mode, "target_itl_ms": None}
    with checked_engine(model, adapter_dirs, pages, **options) as llm:
        yield llm


def _agrees(found: TokenLogprobs, row: torch.Tensor, token: int, top: int) -> None:
    assert found.token_id == token
    assert abs(found.logprob - float(row[token])) < CLOSE
    assert len(found.top) == top
    assert all(abs(value - float(row[t])) < CLOSE for t, value in found.top)
    best = row.topk(top).values.tolist() if top else []
    assert all(abs(value - want) < CLOSE for (_, value), want in zip(found.top, best, strict=True))
    assert dict(found.top).get(token, found.logprob) == found.logprob, "the same float in both places"


@pytest.mark.parametrize("llm", [(400, 512, "auto"), (400, 24, "auto")], indirect=True, ids=["whole", "chunked"])
def test_prompt_and_answer_in_a_mixed_batch(llm: LLM, oracle: Oracle) -> None:
    lengths = (1, 2, 16, 17, 45, 48, 130, 200)
    work = [(LONG[i : i + n], NAMES[i % 4]) for i, n in enumerate(lengths)]
    asked = [replace(GREEDY, max_tokens=6, logprobs=5, prompt_logprobs=3)] * len(work)
    # Others in the same batch ask for nothing, or for one of both.
    asked[1] = replace(asked[1], logprobs=None, prompt_logprobs=None)
    asked[3] = replace(asked[3], prompt_logprobs=None, temperature=0.9, seed=4)
    asked[5] = replace(asked[5], logprobs=0, prompt_logprobs=0)
    done = llm.generate([p for p, _ in work], asked, [n for _, n in work])
    for (prompt, name), sampling, answer in zip(work, asked, done, strict=True):
        if sampling.logprobs is None:
            assert (answer.logprobs, answer.prompt_logprobs) == ((), None)
            continue
        rows = oracle([*prompt, *answer.token_ids], name)
        for i, (found, token) in enumerate(zip(answer.logprobs, answer.token_ids, strict=True)):
            _agrees(found, rows[len(prompt) - 1 + i], token, sampling.logprobs)
        if sampling.prompt_logprobs is None:
            assert answer.prompt_logprobs is None
            continue
        assert answer.prompt_logprobs is not None
        first, *known = answer.prompt_logprobs
        assert (first, len(known)) == (None, len(prompt) - 1)
        for i, found in enumerate(known):
            _agrees(found, rows[i], prompt[i + 1], sampling.prompt_logprobs)
    assert abs(float(oracle(LONG[:9], "two")[3, 4] - oracle(LONG[:9], None)[3, 4])) > 10 * CLOSE, "the adapter matters"


def test_a_cached_prompt_is_computed_again_where_it_is_asked_for(llm: LLM) -> None:
    sampling = replace(GREEDY, prompt_logprobs=1)
    first, again = (llm.generate([LONG], sampling)[0] for _ in range(2))
    assert again.timing.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    plain = llm.generate([LONG], replace(sampling, prompt_logprobs=None))[0]
    assert plain.timing.num_cached_tokens == 192, "its pages serve others"


RECOMPUTE = pytest.param((34, 64, "recompute"), id="recompute", marks=pytest.mark.long)


@pytest.mark.parametrize("llm", [RECOMPUTE, pytest.param((34, 64, "swap"), id="swap")], indirect=True)
def test_preempted_answers_have_the_same_logprobs(llm: LLM) -> None:
    sampling = replace(GREEDY, max_tokens=70, logprobs=2, prompt_logprobs=2)
    prompts = [LONG[i : i + 60] for i in range(8)]
    alone = [llm.generate([prompt], sampling)[0] for prompt in prompts]
    expect_short_answers(llm.engine._parts.scheduler.predictor)
    together = llm.generate(prompts, sampling)
    assert llm.engine.metrics.stats().preemptions_total > 0, "the pool was meant to be too small"
    for one, other in zip(alone, together, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert _floats(one) == pytest.approx(_floats(other), abs=CLOSE)


def _floats(answer: Any) -> list[float]:
    known = [one for one in (*answer.prompt_logprobs, *answer.logprobs) if one is not None]
    assert len(known) == 59 + 70
    return [one.logprob for one in known]


def test_a_step_computes_few_rows_of_prompts_and_delays_no_other_request(llm: LLM) -> None:
    plain = replace(GREEDY, max_tokens=1)
    asks = replace(plain, prompt_logprobs=0)
    rows: list[int] = []
    names: list[list[str]] = []
    run = llm.engine._parts.executor.runner.run

    def noted(step: Any) -> Any:
        rows.append(sum(len(scheduled.prompt_rows) for scheduled in step.requests))
        assert all(scheduled.token_ids for scheduled in step.requests)
        names.append([scheduled.request_id for scheduled in step.requests])
        return run(step)

    llm.engine._parts.executor.runner.run = noted  # type: ignore[method-assign]
    done = llm.generate([LONG, LONG[1:], LONG[2:], LONG[3:]], [asks, asks, asks, plain], [None, None, None, "one"])
    first_of = [next(i for i, step in enumerate(names) if f"offline-{number}" in step) for number in (2, 3)]
    assert first_of[1] < first_of[0], "one of another account does not wait for those that lack rows"
    assert max(rows) == 128
    assert sum(rows) == 199 + 198 + 197
    assert [len(answer.prompt_logprobs or ()) for answer in done] == [200, 199, 198, 0]


def test_an_adapter_without_numbers_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model_runner.prompt_logprobs

    def spoilt(logits: torch.Tensor, requests: Any) -> Any:
        logits = logits.clone()
        if requests and requests[0].adapter_key is None:
            logits[:5] = math.nan
        return whole(logits, requests)

    monkeypatch.setattr(model_runner, "prompt_logprobs", spoilt)
    messages = [llm._message(LONG[:9], replace(GREEDY, prompt_logprobs=0), llm._find(name)) for name in (None, "one")]
    for message in messages:
        llm.engine.add_request(message)
    outputs = [output for _ in range(6) for output in llm.engine.step()]
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {messages[0].request_id: FinishReason.ERROR, messages[1].request_id: FinishReason.LENGTH}


def test_of_equals_the_smaller_id_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, -5.0], [-1.0, -1.0, -2.0, -1.0, -9.0, -1.0, -1.0]])
    assert likeliest(logits, 6).tolist() == [[1, 2, 5, 0, 3, 4], [0, 1, 3, 5, 6, 2]]
    [one, other] = token_logprobs(logits, [5, 4], [2, 7])
    assert one
    assert other
    assert [token for token, _ in one.top] == [1, 2]
    assert one.logprob == one.top[0][1]
    assert dict(other.top)[4] == other.logprob


def test_logits_further_apart_than_a_float_reaches_are_numbers_all_the_same() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [math.inf, 0.0, 0.0], [0.0, math.nan, 0.0], [0.0, -math.inf, 0.0]])
    far, *others = token_logprobs(logits, [1, 0, 0, 1], [3, 3, 3, 3])
    assert far
    assert far.logprob == min(value for _, value in far.top) == torch.finfo(torch.float32).min
    assert others == [None, None, None]


def test_a_row_is_the_same_floats_whatever_is_beside_it() -> None:
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * 9
    together = token_logprobs(logits, [7] * 40, [5] * 40)
    assert together == [token_logprobs(logits[i : i + 1], [7], [5])[0] for i in range(40)]
    exact = logits.double().log_softmax(-1)
    assert all(abs(one.logprob - float(exact[i, 7])) < 1e-5 for i, one in enumerate(together) if one)


@pytest.mark.parametrize("width", [49152, 128256, 1000])
def test_a_row_is_the_same_floats_with_any_number_of_threads(width: int) -> None:
    """Replicas of one machine share its processors, and answer as one server does."""
    logits = torch.randn(20, width, generator=torch.Generator().manual_seed(4)) * 9
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(token_logprobs(logits, [7] * 20, [5] * 20))
    finally:
        torch.set_num_threads(threads)
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 10**6])
def test_out_of_range_names_the_field(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_offsets_are_where_each_token_begins_also_while_text_is_held_back(builtin_tokenizer: Tokenizer) -> None:
    text = "ok 🦜 end"
    ids = builtin_tokenizer.encode(text, add_special_tokens=False)
    sampling = SamplingParams(logprobs=0, stop=("ended", "🦜🦜"))
    processor = OutputProcessor(1, sampling, Detokenizer(builtin_tokenizer))
    offsets, told = [], ""
    for number, token in enumerate(ids, 1):
        end = FinishReason.LENGTH if number == len(ids) else None
        one = TokenLogprobs(token, -1.0)
        output = processor.process(EngineOutput(RequestId("r"), (token,), end, RequestTiming(), logprobs=(one,)))
        assert [known.token_id for known in output.logprobs] == list(output.token_ids)
        offsets += output.text_offsets
        told += output.text
    assert told == text
    assert offsets == [len(builtin_tokenizer.decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))]


def offsets_of(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[int], str]:
    processor = OutputProcessor(1, SamplingParams(logprobs=0), Detokenizer(tokenizer))
    offsets, told = list[int](), ""
    for number, token in enumerate(ids, 1):
        end = FinishReason.LENGTH if number == len(ids) else None
        one = TokenLogprobs(token, -1.0)
        output = processor.process(EngineOutput(RequestId("r"), (token,), end, RequestTiming(), logprobs=(one,)))
        offsets += output.text_offsets
        told += output.text
    return offsets, told


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    ("raw", "offsets"),
    [
        ("🦜a".encode(), [0, 0, 0, 0, 1]),
        ("a🦜é.".encode(), [0, 1, 1, 1, 1, 2, 2, 3]),
        (b"\xf0\x9fa.", {"byte_level": [0, 0, 1, 2], "byte_fallback": [0, 0, 2, 3]}),
        (b"a\xc3", [0, 1]),
    ],
)
def test_offsets_behind_letters_of_several_tokens(
    builtin_tokenizer: Tokenizer, kind: str, raw: bytes, offsets: Any
) -> None:
    """Whichever tokens the letters take: a token begins where its text does, and no offset is below one before it."""
    if kind == "byte_fallback":
        tokenizer = sentencepiece("a.", strips=False)
        ids = [tokenizer.token_id(chr(byte) if byte < 128 else f"<0x{byte:02X}>") for byte in raw]
    else:
        tokenizer, letters = builtin_tokenizer, {byte: char for char, byte in _byte_alphabet().items()}
        ids = [tokenizer.token_id(letters[byte]) for byte in raw]
    known = [token for token in ids if token is not None]
    assert len(known) == len(raw)
    found, text = offsets_of(tokenizer, known)
    assert found == (offsets if isinstance(offsets, list) else offsets[kind])
    assert text == tokenizer.decode(known)
