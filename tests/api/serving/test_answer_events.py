"""Events of a stream, read by its task or written as the outputs come: together they are all of it."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import tiny_tokenizer_json

from api.asgi.json_lines import Json
from api.asgi.sse import event
from api.schemas.tgi import Parameters
from api.serving.answer_events import AnswerEvents
from api.serving.choice_stream import ChoiceStream
from api.serving.generation import Writer
from api.serving.logprobs import LogprobsFormatter
from api.serving.model_resolver import ResolvedModel
from api.serving.openai_responses import (
    REASONING_FIELDS,
    ChatFormat,
    ChunkEvents,
    CompletionFormat,
    ParsedChatFormat,
    ResponseBuilder,
)
from api.serving.tgi_responses import TgiResponseBuilder, TokenWriter
from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.engine.request_stream import RequestStream
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource
from lorasrv.text.tool_parsers.formats import HERMES

RID = RequestId("r")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(TokenizerJson(tiny_tokenizer_json())))


class NoEngine:
    """Aborts nothing."""

    def abort(self, request_id: RequestId) -> None:
        pass


@dataclass
class Connection:
    """A connection that takes parts at once while its client keeps up."""

    can_write: bool = True
    sent: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        assert self.can_write
        self.sent.append(data)

    async def send(self, data: bytes) -> None:
        while not self.can_write:
            await asyncio.sleep(0)
        self.write(data)


def chunks(form: Any, **more: Any) -> Callable[[Tokenizer], Writer]:
    def make(tokenizer: Tokenizer) -> Writer:
        shown = {"top": 1, "logprobs_formatter": LogprobsFormatter(tokenizer)} if more.get("logprobs") else {}
        told = {name: value for name, value in more.items() if name != "logprobs"}
        return ResponseBuilder("a", ResolvedModel('m"\\\0'), form(), created_s=1, started_s=0.0, **shown, **told)

    return make


def tgi(tokenizer: Tokenizer) -> Writer:
    figures = ResponseBuilder("a", ResolvedModel("m"), CompletionFormat(), created_s=1, started_s=0.0)
    return TgiResponseBuilder(figures, Parameters(details=True), "in", (1, 2), None, TokenWriter(tokenizer, 1))


WRITERS = {
    "chat": chunks(ChatFormat),
    "completion": chunks(CompletionFormat),
    "completion, usage": chunks(CompletionFormat, include_usage=True),
    "chat, logprobs": chunks(ChatFormat, logprobs=True),
    "tools": chunks(lambda: ParsedChatFormat(HERMES, frozenset({"f"}), parallel=True)),
    "tgi": tgi,
}


def outputs_of(ids: list[int], sizes: list[int]) -> list[EngineOutput]:
    """An answer in steps of some tokens each, the last one with its end."""
    made, at = [], 0
    for size in sizes:
        new = tuple(ids[at : at + size])
        at += size
        ended = FinishReason.LENGTH if at >= len(ids) else None
        known = tuple(TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in new)
        made.append(EngineOutput(RID, new, ended, RequestTiming(), logprobs=known))
        if ended:
            break
    return made


def without_times(said: bytes) -> bytes:
    """What is said but for the usage, which tells milliseconds."""
    return b"".join(part.partition(b'"usage":{')[0] for part in said.split(b"\n\n"))


async def streamed(
    writer: Writer,
    outputs: list[EngineOutput],
    tokenizer: Tokenizer,
    stop: tuple[str, ...],
    keeps_up: list[bool] | None,
) -> tuple[bytes, int]:
    """What is sent of an answer, and how much of it by its task; `keeps_up` tells of each step whether the client does,
    None that nothing is written at once."""
    sampling = SamplingParams(stop=stop)
    processor = OutputProcessor(2, sampling, Detokenizer(tokenizer))
    stream = RequestStream(NoEngine(), EngineCoreRequest(RID, (1, 2), 999, sampling), processor)
    choices, connection, num_read = ChoiceStream([stream], is_marked=True), Connection(), 0
    events = AnswerEvents(choices, writer.event_writer(choices))
    if keeps_up is not None:
        events.push_to(connection)

    async def read() -> None:
        nonlocal num_read
        async for part in events.chunks():
            num_read += 1
            await connection.send(part)

    reading = asyncio.create_task(read())
    for number, output in enumerate(outputs):
        await asyncio.sleep(0)
        if keeps_up is not None:
            connection.can_write = keeps_up[number % len(keeps_up)]
        if stream.deliver(output).finished:
            break
    connection.can_write = True
    await asyncio.wait_for(reading, 10)
    return b"".join(connection.sent), num_read


@settings(deadline=None, max_examples=40)
@given(
    text=st.text(alphabet='ab "\\é\u2028🦜{}', min_size=1, max_size=24)
    | st.just('x<tool_call>{"name":"f"}</tool_call>y'),
    sizes=st.lists(st.integers(0, 5), min_size=60, max_size=60),
    stop=st.lists(st.text(alphabet='ab "', min_size=1, max_size=3), max_size=2),
    keeps_up=st.lists(st.booleans(), min_size=1, max_size=9),
)
@pytest.mark.parametrize("writer", WRITERS)
def test_both_ways_together_say_the_same(
    tokenizer: Tokenizer, writer: str, text: str, sizes: list[int], stop: list[str], keeps_up: list[bool]
) -> None:
    outputs = outputs_of(tokenizer.encode(text, add_special_tokens=False), [*sizes, 999])

    def said(keeps_up: list[bool] | None) -> bytes:
        made = WRITERS[writer](tokenizer)
        return without_times(asyncio.run(streamed(made, outputs, tokenizer, tuple(stop), keeps_up))[0])

    assert said(keeps_up) == said(None)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_client_that_keeps_up_is_written_to_at_once(tokenizer: Tokenizer, writer: str) -> None:
    outputs = outputs_of(tokenizer.encode("one two three four five six"), [1] * 99)
    made = WRITERS[writer](tokenizer)
    said, num_read = asyncio.run(streamed(made, outputs, tokenizer, (), [True]))
    assert said.count(b"data: ") > len(outputs) - 2
    assert num_read <= 2, "the last output, and what follows it"


class Thoughts(ChatFormat):
    """Says nothing but reasoning."""

    is_parsed = True

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        return [self.delta(output.text)]

    def delta(self, text: str) -> Json:
        return {"delta": dict.fromkeys(REASONING_FIELDS, text)}


@pytest.mark.parametrize(
    ("form", "parsed"),
    [(ChatFormat, False), (CompletionFormat, False), (ChatFormat, True), (CompletionFormat, True), (Thoughts, True)],
)
@given(text=st.text(min_size=1))
def test_chunks_that_differ_in_their_text_only_are_those_of_the_encoder(form: Any, parsed: bool, text: str) -> None:
    """What stands around a text is encoded once a stream."""
    form_ = form()
    form_.is_parsed = parsed
    builder = ResponseBuilder("a", ResolvedModel("\0m"), form_, created_s=1)
    writer, output = ChunkEvents(builder, ChoiceStream([])), RequestOutput(RID, text, (1,), 1, 1, RequestTiming())
    assert writer.write(0, replace(output, text="")) == b"" or form is not CompletionFormat
    assert writer.write(0, replace(output, text="")) == b""
    for index in (0, 0, 1, 1):
        encoded = event(builder.envelope(form_.chunk_object, [builder.choice(index, form_.delta(text))]))
        assert writer.write(index, output).endswith(encoded)
    assert writer.write(1, output) == encoded


def test_a_stream_is_freed_when_it_has_ended(tokenizer: Tokenizer) -> None:
    """Its prompt and its connection are not kept until garbage is collected."""
    outputs = outputs_of(tokenizer.encode("one two three"), [1] * 99)
    ended: list[weakref.ref[RequestStream]] = []

    async def run() -> None:
        sampling = SamplingParams()
        stream = RequestStream(
            NoEngine(),
            EngineCoreRequest(RID, (1, 2), 99, sampling),
            OutputProcessor(2, sampling, Detokenizer(tokenizer)),
        )
        ended.append(weakref.ref(stream))
        choices = ChoiceStream([stream])
        events = AnswerEvents(choices, chunks(ChatFormat)(tokenizer).event_writer(choices))
        events.push_to(Connection())
        reading = asyncio.create_task(anext(events.chunks()))
        for output in outputs:
            await asyncio.sleep(0)
            stream.deliver(output)
        await reading

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert ended[0]() is None
    finally:
        gc.enable()


def test_what_cannot_be_written_ends_the_stream_with_its_error(tokenizer: Tokenizer) -> None:
    """An output without a log-probability, which TGI needs, fails in the engine's call and is told by the task."""
    outputs = outputs_of(tokenizer.encode("one two three"), [1] * 99)
    stream = RequestStream(
        NoEngine(),
        EngineCoreRequest(RID, (1, 2), 99, SamplingParams()),
        OutputProcessor(2, SamplingParams(), Detokenizer(tokenizer)),
    )

    async def run() -> bytes:
        choices, connection = ChoiceStream([stream]), Connection()
        events = AnswerEvents(choices, tgi(tokenizer).event_writer(choices))
        events.push_to(connection)
        reading = asyncio.create_task(anext(events.chunks()))
        await asyncio.sleep(0)
        stream.deliver(EngineOutput(RID, outputs[0].new_token_ids, None, RequestTiming()))
        return await reading

    assert b"log-probability" in asyncio.run(run())
    assert (stream.abort_reason, stream.num_generated_tokens) == ("api_error", len(outputs[0].new_token_ids))
