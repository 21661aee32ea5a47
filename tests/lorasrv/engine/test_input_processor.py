"""What may become a request, and what it becomes: by one processor, without a model."""

from dataclasses import replace
from typing import Any

import pytest
from bare_processor import CONTEXT, EOS, KEY, LARGE, PAGE, PROMPT, RID, SMALL, VOCAB, Adapters, Words, processor

from adapter_store.spec import AdapterKey
from lorasrv.engine.input_processor import MAX_PRIORITY, MAX_TIMEOUT_S, further_choices
from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.errors import ContextLengthExceeded, InvalidRequest, PoisonRequest
from lorasrv.outputs import AdapterTier, RequestId
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import BeamOptions, SamplingParams, TextOptions, Watermark
from sgmv_kernels.formats.adapter_panels import AdapterLayout


def process(
    prompt: Any = PROMPT, sampling: SamplingParams | None = None, key: AdapterKey | None = None, **options: Any
) -> EngineCoreRequest:
    asked = RequestOptions(adapter_key=key, **options)
    return processor(adapters=Adapters(SMALL)).process(RID, prompt, sampling or SamplingParams(), asked)


class NoConstraint:
    def __init__(self, *, ends_answer: bool = True) -> None:
        self.ends_answer = ends_answer

    def begin(self) -> Any:
        raise AssertionError("no request begins here")


BUDGET = NoConstraint(ends_answer=False)


class TestDefaults:
    def test_an_answer_takes_the_rest_of_the_context_or_of_the_pool(self) -> None:
        assert process().max_tokens == CONTEXT - len(PROMPT)
        small = processor(pages=5).process(RID, PROMPT, SamplingParams())
        assert small.max_tokens == 5 * PAGE - len(PROMPT)
        beams = processor(pages=8).process(
            RID, PROMPT, SamplingParams(temperature=0.0), RequestOptions(beams=BeamOptions(3))
        )
        assert beams.max_tokens == 2 * PAGE - len(PROMPT)

    def test_a_random_request_has_a_seed_and_a_greedy_one_needs_none(self) -> None:
        assert process().sampling.seed != process().sampling.seed
        assert process(sampling=SamplingParams(seed=5)).sampling.seed == 5
        assert process(sampling=SamplingParams(temperature=0.0)).sampling.seed is None

    def test_what_may_end_an_answer_is_known_where_a_least_length_is_asked_for(self) -> None:
        asked = SamplingParams(min_tokens=3, stop_token_ids=(9, EOS))
        assert process(sampling=asked).sampling.end_token_ids == (9, EOS)
        assert process(sampling=replace(asked, ignore_eos=True, stop_token_ids=(9,))).sampling.end_token_ids == (9,)

    def test_a_watermark_is_the_servers(self) -> None:
        mark = Watermark(gamma=0.4, delta=6.0, key=77)
        request = processor(watermark=mark).process(RID, PROMPT, SamplingParams(watermark=True))
        assert request.sampling.watermark == mark

    def test_text_becomes_tokens(self) -> None:
        assert process("hello").prompt_token_ids == tuple(b"hello")

    @pytest.mark.parametrize("strips", [True, False])
    def test_whoever_sends_a_grammar_says_which_text_its_tokens_have(self, strips: bool) -> None:
        text = TextOptions(strip_start=strips)
        assert process(constraint=NoConstraint(), text=text).text == text

    def test_a_constraint_may_leave_the_end_of_the_answer_to_others(self) -> None:
        sampling = SamplingParams(min_tokens=3, ignore_eos=True, allowed_token_ids=(5, 6))
        assert process(sampling=sampling, constraint=BUDGET).constraint is BUDGET

    def test_an_adapter_is_held_and_its_layout_and_place_are_known(self) -> None:
        adapters = Adapters(SMALL)
        made = processor(adapters=adapters)
        request = made.process(RID, PROMPT, SamplingParams(), RequestOptions(adapter_key=KEY, adapter_id="mia"))
        assert (request.adapter_key, request.adapter_id, request.terms) == (KEY, "mia", ((KEY, 1.0, SMALL),))
        assert (request.hold, request.found) == (("held", KEY), AdapterTier.DISK)
        adapters.is_hosted = True
        assert made.process(RID, PROMPT, SamplingParams(), RequestOptions(adapter_key=KEY)).found is AdapterTier.HOST

    def test_choices_share_a_prompt_and_count_the_seed_up(self) -> None:
        sampling = SamplingParams(seed=2**64 - 1, prompt_logprobs=2)
        first, *others = processor().process_choices([RequestId(c) for c in "abc"], PROMPT, sampling)
        assert [other.sampling.seed for other in others] == [0, 1]
        assert [other.fork_of for other in others] == ["a", "a"]
        assert [r.sampling.prompt_logprobs for r in (first, *others)] == [2, None, None]
        assert further_choices(process(sampling=SamplingParams(temperature=0.0)), [RID])[0].sampling.seed is None


@pytest.mark.parametrize(
    ("sampling", "fields", "param", "words"),
    [
        ({}, {"prompt": []}, "prompt", "the prompt is empty"),
        ({}, {"prompt": ""}, "prompt", "the prompt is empty"),
        ({}, {"prompt": [5, VOCAB]}, "prompt", r"\[0, 384\)"),
        ({}, {"prompt": [-1]}, "prompt", r"\[0, 384\)"),
        ({}, {"priority": MAX_PRIORITY + 1}, "priority", "between -1000 and 1000"),
        ({}, {"timeout_s": 0.0}, "timeout_s", "above 0"),
        ({}, {"timeout_s": MAX_TIMEOUT_S + 1}, "timeout_s", "at most 86400"),
        ({}, {"beams": BeamOptions(2), "constraint": NoConstraint()}, "use_beam_search", "with a grammar"),
        ({}, {"beams": BeamOptions(2), "constraint": BUDGET}, "use_beam_search", "with thinking_token_budget"),
        ({"min_tokens": 5000}, {}, "min_tokens", "min_tokens is 5000, but there is room for 236"),
        ({"ignore_eos": True}, {"constraint": NoConstraint()}, "ignore_eos", "^ignore_eos contradicts"),
        ({"min_tokens": 1}, {"constraint": NoConstraint()}, "min_tokens", "^min_tokens contradicts"),
        ({"logit_bias": ((VOCAB, 1.0),)}, {}, "logit_bias", r"token ids in \[0, 384\)"),
        ({"logit_bias": ((2**30, 1.0),)}, {}, "logit_bias", r"token ids in \[0, 384\)"),
        ({"logit_bias": tuple((t, -100.0) for t in range(VOCAB))}, {}, "logit_bias", "bans every token"),
        ({"stop_token_ids": (VOCAB,)}, {}, "stop_token_ids", r"token ids in \[0, 384\)"),
        ({"stop_token_ids": (-1,)}, {}, "stop_token_ids", r"token ids in \[0, 384\)"),
        ({"seed": 1}, {"beams": BeamOptions(2)}, "seed", "does not go with beam search"),
        ({"top_p": 0.5}, {"beams": BeamOptions(2)}, "top_p", "does not go with beam search"),
    ],
)
def test_refusals_name_the_field(sampling: dict[str, Any], fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        process(sampling=SamplingParams(**sampling), **fields)
    assert caught.value.param == param


class TestWhatCanNeverFit:
    @pytest.mark.parametrize(
        ("prompt", "tokens", "param", "words"),
        [
            (PROMPT, 237, "max_tokens", r"holds 256 tokens.* 257: 20 of the prompt and 237 to generate \(max_tokens\)"),
            ([1] * 256, 1, "prompt", "257: 256 of the prompt and 1 to generate; shorten prompt"),
            ([1] * 300, None, "prompt", "301: 300 of the prompt and 1 to generate; shorten prompt"),
        ],
    )
    def test_the_context(self, prompt: list[int], tokens: int | None, param: str, words: str) -> None:
        with pytest.raises(ContextLengthExceeded, match=words) as caught:
            process(prompt, SamplingParams(max_tokens=tokens))
        assert caught.value.param == param
        assert process(PROMPT, SamplingParams(max_tokens=236)).max_tokens == 236

    def test_the_pool_beside_the_adapter(self) -> None:
        made = processor(pages=6, adapters=Adapters(SMALL))
        assert made.process(RID, PROMPT, SamplingParams(max_tokens=5 * PAGE - 20), RequestOptions(adapter_key=KEY))
        words = "pool has 6 pages, but the request needs 7: 6 for 96 tokens and 1 for the adapter; lower max_tokens or"
        with pytest.raises(ContextLengthExceeded, match=words) as caught:
            made.process(RID, PROMPT, SamplingParams(max_tokens=6 * PAGE - 20), RequestOptions(adapter_key=KEY))
        assert caught.value.param == "max_tokens"

    def test_a_text_is_not_tokenized_that_is_too_long_by_its_length(self) -> None:
        words = Words()
        made = processor(tokenizer=words)
        with pytest.raises(
            ContextLengthExceeded, match="256 tokens, but the text of prompt has at least 257"
        ) as caught:
            made.process(RID, "x" * 8 * 257, SamplingParams())
        assert (caught.value.param, words.num_encoded) == ("prompt", 0)

    @pytest.mark.parametrize(
        ("layout", "host_bytes", "words"),
        [
            (SMALL, SMALL.nbytes - 1, "host memory for adapters is .* --host-cache-bytes"),
            (LARGE, 1 << 20, r"takes \d+ pages, but the pool has 4 for adapters; .* --pool-bytes"),
        ],
    )
    def test_the_adapter(self, layout: AdapterLayout, host_bytes: int, words: str) -> None:
        with pytest.raises(InvalidRequest, match=words) as caught:
            processor(4, Adapters(layout, host_bytes)).process(
                RID, PROMPT, SamplingParams(), RequestOptions(adapter_key=KEY)
            )
        assert caught.value.param == "adapter_id"

    def test_an_adapter_where_there_is_no_store(self) -> None:
        with pytest.raises(InvalidRequest, match="no store of adapters"):
            processor().process(RID, PROMPT, SamplingParams(), RequestOptions(adapter_key=KEY))


def test_what_has_made_the_engine_fail_twice_is_refused() -> None:
    poison = PoisonGuard()
    made = processor(poison=poison)
    for _ in range(2):
        poison.record([made.process(RID, PROMPT, SamplingParams())])
    with pytest.raises(PoisonRequest, match="2 times"):
        made.process(RID, PROMPT, SamplingParams())
    assert made.process(RID, PROMPT[1:], SamplingParams())
