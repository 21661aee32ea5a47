"""Text of a request: whole characters, stop strings cut exactly, one end."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer


def _steps(tokenizer: Tokenizer, text: str, sampling: SamplingParams, **last: object) -> list[RequestOutput]:
    """Feed a text token by token, the last with a finish reason, until the processor says that it is over."""
    processor = OutputProcessor(5, sampling, Detokenizer(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    outputs: list[RequestOutput] = []
    for i, token in enumerate(ids):
        end = {"finish_reason": FinishReason.LENGTH, **last} if i == len(ids) - 1 else {"finish_reason": None}
        outputs.append(processor.process(EngineOutput(RequestId("r"), (token,), timing=RequestTiming(), **end)))
        if outputs[-1].finished:
            break
    return outputs


def _text(outputs: list[RequestOutput]) -> str:
    return "".join(o.text for o in outputs)


def test_without_stops_the_text_is_all_there(builtin_tokenizer: Tokenizer) -> None:
    text = "Grüße 🦜 aus 한국!"
    outputs = _steps(builtin_tokenizer, text, SamplingParams())
    assert _text(outputs) == text
    assert all("\ufffd" not in o.text for o in outputs)
    assert [o.finished for o in outputs].count(True) == 1
    assert outputs[-1].num_generated_tokens == len(outputs)


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (("parrot",), "The blue "),
        ((" par",), "The blue"),
        (("zzz", "e p"), "The blu"),
        (("parrot sat.", "blue"), "The "),
        (("not here",), "The blue parrot sat."),
        (("sat. And more",), "The blue parrot sat."),
    ],
)
def test_stop_strings_cut_exactly(builtin_tokenizer: Tokenizer, stop: tuple[str, ...], want: str) -> None:
    outputs = _steps(builtin_tokenizer, "The blue parrot sat.", SamplingParams(stop=stop))
    assert _text(outputs) == want
    hit = next((s for s in stop if s in "The blue parrot sat."), None)
    assert outputs[-1].finish_reason is (FinishReason.STOP if hit else FinishReason.LENGTH)
    assert outputs[-1].stop_reason == (hit if hit != "parrot sat." else "blue")


def test_a_stop_string_may_span_the_bytes_of_one_character(builtin_tokenizer: Tokenizer) -> None:
    outputs = _steps(builtin_tokenizer, "ok 🦜🦜 more", SamplingParams(stop=("🦜",)))
    assert _text(outputs) == "ok "


def test_a_stop_token_is_not_shown(builtin_tokenizer: Tokenizer) -> None:
    ids = builtin_tokenizer.encode("one two", add_special_tokens=False)
    outputs = _steps(
        builtin_tokenizer, "one two", SamplingParams(), finish_reason=FinishReason.STOP, stop_token_id=ids[-1]
    )
    assert _text(outputs) == "one"
    assert outputs[-1].stop_reason == ids[-1]


@given(st.text(alphabet="ab c", max_size=30), st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), max_size=3))
def test_text_ends_where_a_stop_begins_and_holds_none(
    builtin_tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    if not builtin_tokenizer.encode(text, add_special_tokens=False):
        return
    got = _text(_steps(builtin_tokenizer, text, SamplingParams(stop=tuple(stops))))
    assert text.startswith(got)
    assert not any(stop in got for stop in stops)
    if any(stop in text for stop in stops):
        assert any(text[len(got) :].startswith(stop) for stop in stops)
    else:
        assert got == text


@pytest.mark.parametrize(
    ("min_tokens", "stop", "want"),
    [
        (0, ("b",), "a"),
        (2, ("b",), "aba"),  # the first "b" is one of the two that must come
        (1, ("ab",), ""),  # begun early, ended later: it counts
        (2, ("ab",), "ab"),
        (3, ("bab",), "a"),
        (2, ("b", "abX"), "aba"),  # what is held back for the other is not looked at again
        (4, ("ab",), "ababc"),
        (9, ("c",), "ababc"),
    ],
)
def test_stop_strings_wait_for_min_tokens(
    builtin_tokenizer: Tokenizer, min_tokens: int, stop: tuple[str, ...], want: str
) -> None:
    processor = OutputProcessor(5, SamplingParams(stop=stop, min_tokens=min_tokens), Detokenizer(builtin_tokenizer))
    ids = [builtin_tokenizer.token_id(char) for char in "ababc"]
    text = ""
    for i, token in enumerate(ids):
        reason = FinishReason.LENGTH if i == len(ids) - 1 else None
        output = processor.process(EngineOutput(RequestId("r"), (token,), reason, RequestTiming()))
        text += output.text
        if output.finished:
            break
    assert text == want


def _together(outputs: list[RequestOutput]) -> RequestOutput:
    whole = outputs[0]
    for output in outputs[1:]:
        whole = whole.followed_by(output)
    return whole


@given(
    st.text(alphabet="ab c🦜", max_size=24),
    st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(1, 7), min_size=30, max_size=30),
    st.booleans(),
)
def test_several_tokens_at_once_are_those_tokens_one_by_one(
    builtin_tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int, sizes: list[int], stop_token: bool
) -> None:
    """Text, ids, logprobs, offsets and the end, wherever steps begin and end."""
    ids = builtin_tokenizer.encode(text, add_special_tokens=False)
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)

    def said(sizes: Iterator[int]) -> RequestOutput:
        processor, outputs, at = OutputProcessor(5, sampling, Detokenizer(builtin_tokenizer)), [], 0
        while not outputs or not outputs[-1].finished:
            new = tuple(ids[at : at + next(sizes)])
            at += len(new)
            is_last = at == len(ids)
            output = EngineOutput(
                RequestId("r"),
                new,
                FinishReason.STOP if is_last else None,
                RequestTiming(),
                stop_token_id=ids[-1] if is_last and stop_token and ids else None,
                logprobs=tuple(TokenLogprobs(token, -1.0) for token in new),
                prompt_logprobs=(None, TokenLogprobs(7, -2.0)) if not outputs else None,
            )
            outputs.append(processor.process(output))
        return _together(outputs)

    assert said(iter(sizes)) == said(itertools.repeat(1))
