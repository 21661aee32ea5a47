"""Text of a request: whole characters, stop strings cut exactly, one end; and the requests of a deleted adapter."""

import asyncio
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import GREEDY, PATIENCE_S, PROMPT, collect, tokens

from lorasrv.config import NO_SHARE
from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.errors import AdapterDeleted, EngineOverloaded
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import PLAIN_TEXT, SamplingParams, TextOptions
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer

LONG = replace(GREEDY, max_tokens=400)


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

    whole = said(iter(sizes))
    assert whole == said(itertools.repeat(1))
    assert "".join(whole.token_texts) == whole.text


# The requests of a deleted adapter, on the real engine.


@pytest.mark.engine(dies=True)
async def test_waiting_ends_with_the_last_choice(engine, keys) -> None:
    key, until_unused = keys["one"], engine.in_flight.until_unused
    streams = await engine.add_choices(PROMPT, GREEDY, 3, adapter=key, adapter_id="one", versions=[("one", 1)])
    # The same version of another name, another version of the name with the same content, and the base.
    for adapter, name, version in ((key, "uno", 1), (key, "one", 2), (None, "", 0)):
        await engine.add(PROMPT, LONG, adapter=adapter, adapter_id=name, versions=[(name, version)])
    assert await until_unused("one", [1], 0.0) == 1
    assert await until_unused("one", [1], PATIENCE_S) == 0
    for stream in streams:
        assert await asyncio.wait_for(collect(stream), 0.1)
    assert await until_unused("uno", [1], 0.0) == 1
    await engine.shutdown()
    assert await until_unused("uno", [1], 0.0) == 0


async def test_aborted_requests_say_why_and_free_their_pages(engine, keys) -> None:
    key = keys["one"]
    runs = await engine.add(PROMPT, LONG, adapter=key, adapter_id="one", versions=[("one", 1)])
    another = await engine.add(PROMPT, GREEDY, adapter=key, adapter_id="uno", versions=[("uno", 1)])
    await anext(runs)
    waits = await engine.add(PROMPT, LONG, adapter=key, adapter_id="one", versions=[("one", 1)])
    assert engine.in_flight.abort_adapter("one", [1]) == 2
    for stream in (runs, waits):
        with pytest.raises(AdapterDeleted, match="'one' was deleted"):
            await collect(stream)
    assert await collect(another)
    assert await engine.in_flight.until_unused("uno", [1], PATIENCE_S) == 0


async def test_only_requests_without_an_output_are_refused(engine, keys) -> None:
    key, error = keys["one"], EngineOverloaded("none of the adapter's limits is this server's", retry_after_s=1.0)
    runs = await engine.add(PROMPT, LONG, adapter=key, adapter_id="one", versions=[("one", 1)])
    first = await anext(runs)
    await engine.set_share("one", NO_SHARE)
    waits, other = [
        await engine.add(PROMPT, GREEDY, adapter=key, adapter_id=name, versions=[(name, 1)]) for name in ("one", "uno")
    ]
    assert engine.in_flight.abort_unanswered("one", error) == 1
    with pytest.raises(EngineOverloaded, match="none of"):
        await collect(waits)
    assert len(tokens([first, *await collect(runs)])) == LONG.max_tokens
    assert await collect(other)


async def test_a_request_that_is_being_admitted_is_aborted_too(engine, keys, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, admit = asyncio.get_running_loop(), engine.input_processor.processor.process_choices

    async def abort() -> None:
        assert engine.in_flight.abort_adapter("one", [1]) == 1

    def slow(*args: object, **options: object) -> object:
        asyncio.run_coroutine_threadsafe(abort(), loop).result()
        return admit(*args, **options)

    monkeypatch.setattr(engine.input_processor.processor, "process_choices", slow)
    with pytest.raises(AdapterDeleted):
        await engine.add(PROMPT, GREEDY, adapter=keys["one"], adapter_id="one", versions=[("one", 1)])
    assert await engine.in_flight.until_unused("one", [1], 0.0) == 0
