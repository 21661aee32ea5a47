"""Text of a request: whole characters, stop strings cut exactly, and one end."""

import functools
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import PLAIN_TEXT, SamplingParams, TextOptions
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer


def _steps(
    tokenizer: Tokenizer,
    answer: str | list[int],
    sampling: SamplingParams,
    text: TextOptions = PLAIN_TEXT,
    **last: object,
) -> list[RequestOutput]:
    """Feed an answer token by token, the last with a finish reason, until the processor says that it is over."""
    processor = OutputProcessor(5, sampling, Detokenizer(tokenizer, text))
    ids = tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
    outputs: list[RequestOutput] = []
    for token in ids:
        end = {"finish_reason": None} if len(outputs) < len(ids) - 1 else {"finish_reason": FinishReason.LENGTH, **last}
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
    ("text", "stop", "want", "hit"),
    [
        ("The blue parrot sat.", ("parrot",), "The blue ", "parrot"),
        ("The blue parrot sat.", (" par",), "The blue", " par"),
        ("The blue parrot sat.", ("zzz", "e p"), "The blu", "e p"),
        ("The blue parrot sat.", ("parrot sat.", "blue"), "The ", "blue"),
        ("The blue parrot sat.", ("not here",), "The blue parrot sat.", None),
        ("The blue parrot sat.", ("sat. And more",), "The blue parrot sat.", None),
        ("ok 🦜🦜 more", ("🦜",), "ok ", "🦜"),
    ],
)
def test_stop_strings_cut_exactly(
    builtin_tokenizer: Tokenizer, text: str, stop: tuple[str, ...], want: str, hit: str | None
) -> None:
    outputs = _steps(builtin_tokenizer, text, SamplingParams(stop=stop))
    assert _text(outputs) == want
    assert outputs[-1].finish_reason is (FinishReason.STOP if hit else FinishReason.LENGTH)
    assert outputs[-1].stop_reason == hit
    kept = _steps(builtin_tokenizer, text, SamplingParams(stop=stop), TextOptions(keep_stop=True))
    assert (_text(kept), kept[-1].stop_reason) == (want + (hit or ""), hit)


def test_a_stop_token_is_shown_only_if_it_is_kept(builtin_tokenizer: Tokenizer) -> None:
    last = builtin_tokenizer.encode("one two", add_special_tokens=False)[-1]
    ends = {"finish_reason": FinishReason.STOP, "stop_token_id": last}
    outputs = _steps(builtin_tokenizer, "one two", SamplingParams(), **ends)
    assert (_text(outputs), outputs[-1].stop_reason) == ("one", last)
    kept = _steps(builtin_tokenizer, "one two", SamplingParams(), TextOptions(keep_stop=True), **ends)
    assert (_text(kept), kept[-1].stop_reason) == ("one two", last)


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
    ids = [builtin_tokenizer.token_id(char) for char in "ababc"]
    assert _text(_steps(builtin_tokenizer, ids, SamplingParams(stop=stop, min_tokens=min_tokens))) == want


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
        return functools.reduce(RequestOutput.followed_by, outputs)

    whole = said(itertools.cycle(sizes))
    assert whole == said(itertools.repeat(1))
    assert "".join(whole.token_texts) == whole.text
