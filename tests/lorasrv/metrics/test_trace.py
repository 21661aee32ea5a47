"""Traces: what is malformed is named by line and field, what is written is read back, what is served is recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from clock import Clock
from traces import write_trace

from lorasrv.errors import InvalidTrace
from lorasrv.metrics.trace import TraceRequest, parse_line, read_trace
from lorasrv.metrics.trace_recorder import TraceRecorder
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams

GOOD = {"arrival_s": 1.5, "prompt_tokens": 7, "output_tokens": 3}


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({**GOOD, "prompt_tokens": "x"}, 'prompt_tokens must be a positive integer, not "x"'),
        ({**GOOD, "prompt_tokens": 0}, "prompt_tokens must be a positive integer, not 0"),
        ({**GOOD, "output_tokens": 2.5}, "output_tokens must be a positive integer, not 2.5"),
        ({**GOOD, "output_tokens": True}, "output_tokens must be a positive integer, not true"),
        ({**GOOD, "arrival_s": -1}, "arrival_s must be a number of seconds between 0 and 1e+09, not -1"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "between 0 and 1e+09, not NaN"),
        ('{"arrival_s": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be"),
        (f'{{"arrival_s": 1{"0" * 400}, "prompt_tokens": 1, "output_tokens": 1}}', "arrival_s must be"),
        ({**GOOD, "adapter": 3}, "adapter must be a name, or null for the base, not 3"),
        ({**GOOD, "adapter": ""}, "adapter must be"),
        ({**GOOD, "cached_tokens": -1}, "cached_tokens must be an integer, 0 or more, not -1"),
        ({**GOOD, "accepted_tokens": 1}, "accepted_tokens is 1, more than drafted_tokens, 0"),
        ({**GOOD, "cached_tokens": 8}, "cached_tokens is 8, more than prompt_tokens, 7"),
        ({**GOOD, "max_tokens": 2}, "max_tokens is 2, less than output_tokens, 3"),
        ({**GOOD, "priority": "high"}, "priority must be an integer between -1000 and 1000"),
        ({**GOOD, "timeout_s": 0}, "timeout_s must be above 0"),
        ({**GOOD, "adapter_bytes": 0}, "adapter_bytes must be a positive integer"),
        ({**GOOD, "ttft_ms": "fast"}, "ttft_ms must be a number of milliseconds"),
        ({**GOOD, "tier": "tape"}, 'tier must be one of resident, host, disk, not "tape"'),
        ({"arrival_s": 1, "prompt_tokens": 1}, "output_tokens is missing"),
        ("[1, 2]", "must be a JSON object, not [1, 2]"),
        ("{", "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    with pytest.raises(InvalidTrace) as raised:
        read_trace(_file(tmp_path, GOOD, "", line))
    message = str(raised.value)
    assert message.startswith("trace.jsonl:3: ")
    assert complaint in message
    assert len(message) < 200


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b'{"arrival_s": \xff}\n')
    with pytest.raises(InvalidTrace, match="t:1: not a line of JSON"):
        read_trace(path)


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_an_empty_trace(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(InvalidTrace, match="the trace is empty"):
        read_trace(_file(tmp_path, *lines))


def test_unknown_fields_are_ignored_and_arrivals_sorted(tmp_path: Path) -> None:
    read = read_trace(_file(tmp_path, {**GOOD, "colour": "red"}, {**GOOD, "arrival_s": 0, "adapter": None}))
    assert [r.arrival_s for r in read] == [0, 1.5]
    assert read[1] == TraceRequest(1.5, 7, 3)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    full = TraceRequest(
        0.25, 7, 3, "mia", 9, 4, -2, 30.0, "key", 460800, 1.5, 20.0, 0.5, 0.25, AdapterTier.DISK, 3, 5, 2, "stop"
    )
    write_trace(tmp_path / "t", [full, TraceRequest(1.0, 1, 1)])
    assert read_trace(tmp_path / "t") == (full, TraceRequest(1.0, 1, 1))
    assert (tmp_path / "t").read_text().splitlines()[1] == TraceRequest(1.0, 1, 1).line()


# Recording.


def _message(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(RequestId(name), (1, 2, 3), 16, SamplingParams(), principal="me", adapter_id="mia")


def _output(name: str, tokens: int, reason: FinishReason | None = None) -> RequestOutput:
    timing = RequestTiming(queue_ms=2.0, load_ms=1.0, tier=AdapterTier.HOST, num_cached_tokens=2)
    return RequestOutput(RequestId(name), "x", (), 3, tokens, timing, reason)


def test_a_request_is_recorded_when_it_ends(tmp_path: Path) -> None:
    clock = Clock()
    with TraceRecorder(tmp_path / "t", clock) as recorder:
        clock.now += 1.0
        recorder.on_accepted([_message("a"), _message("b")], 1000.5)
        recorder.on_output(RequestId("a"), _output("a", 1))
        clock.now += 1.0
        recorder.on_output(RequestId("a"), _output("a", 2, FinishReason.STOP))
        recorder.on_finished(RequestId("a"))
        assert len((tmp_path / "t").read_text().splitlines()) == 1, "it is there before the recorder ends"
        recorder.on_output(RequestId("unknown"), _output("unknown", 1, FinishReason.STOP))
        recorder.on_finished(RequestId("unknown"))
    [line] = read_trace(tmp_path / "t")
    assert line == TraceRequest(
        0.5, 3, 2, "mia", 16, 2, key="me", ttft_ms=500.0, total_ms=1500.0, queue_ms=2.0, load_ms=1.0,
        tier=AdapterTier.HOST, finish="stop",
    )  # fmt: skip


def test_who_leaves_is_marked_and_who_got_nothing_left_out(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t", Clock()) as recorder:
        recorder.on_accepted([_message(name) for name in ("leaves", "late", "refused", "stops")], 1000.0)
        recorder.on_output(RequestId("leaves"), _output("leaves", 4))
        recorder.on_finished(RequestId("leaves"), "client")
        recorder.on_finished(RequestId("leaves"), "client")
        recorder.on_output(RequestId("late"), _output("late", 16, FinishReason.LENGTH))
        recorder.on_finished(RequestId("late"), "client")
        recorder.on_output(RequestId("refused"), _output("refused", 0, FinishReason.REFUSED))
        recorder.on_finished(RequestId("refused"))
        recorder.on_output(RequestId("stops"), _output("stops", 4))
        recorder.on_finished(RequestId("stops"), "server_stopping")
        # Another replica has generated what it begins with.
        recorder.on_accepted([replace(_message("resumed"), resumed_token_ids=(1, 2, 3))], 1000.0)
        recorder.on_output(RequestId("resumed"), _output("resumed", 3))
        recorder.on_output(RequestId("resumed"), _output("resumed", 3, FinishReason.TIMEOUT))
        recorder.on_finished(RequestId("resumed"))
    lines = read_trace(tmp_path / "t")
    assert [(line.finish, line.output_tokens) for line in lines] == [("abort", 4), ("length", 16)]


def test_a_second_start_goes_on_after_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        with TraceRecorder(tmp_path / "t", clock := Clock()) as recorder:
            recorder.on_accepted([_message("a")], clock.now + 3)
            clock.now += 5
            recorder.on_output(RequestId("a"), _output("a", 1, FinishReason.LENGTH))
            recorder.on_finished(RequestId("a"))
    first, second = read_trace(tmp_path / "t")
    assert first.arrival_s == 3
    assert 8 <= second.arrival_s < 60, "after the end of the first, by the time that lay between"


def test_half_a_line_at_the_end_is_cut_off(tmp_path: Path) -> None:
    """A full disk leaves it, and a loss of power."""
    path = tmp_path / "t"
    for torn in (b'{"arrival_s": 2.0, "prom', b""):
        with TraceRecorder(path, clock := Clock()) as recorder:
            recorder.on_accepted([_message("a")], clock.now)
            recorder.on_output(RequestId("a"), _output("a", 1, FinishReason.LENGTH))
            recorder.on_finished(RequestId("a"))
        with path.open("ab") as file:
            file.write(torn)
    assert len(read_trace(path)) == 2
    notes = tmp_path / "notes.txt"
    notes.write_text("buy milk\nand br")
    with pytest.raises(InvalidTrace):
        TraceRecorder(notes)
    assert notes.read_text() == "buy milk\nand br"


def test_what_is_no_trace_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    with pytest.raises(InvalidTrace, match=r"notes\.txt, last line: not a line of JSON"):
        TraceRecorder(path)
    assert path.read_text() == "buy milk\n"
    with pytest.raises(OSError, match="directory"):
        TraceRecorder(tmp_path)


def test_a_full_disk_ends_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(Path("/dev/full"), Clock())
    recorder.on_accepted([_message("a"), _message("b")], 1000.0)
    for name in "ab":
        recorder.on_output(RequestId(name), _output(name, 1, FinishReason.STOP))
        recorder.on_finished(RequestId(name))
    (record,) = caplog.records
    assert record.getMessage().startswith("the trace cannot be written (No space left on device)")
    assert (record.levelname, record.exc_info) == ("ERROR", None)


def test_a_line_by_itself() -> None:
    assert parse_line(TraceRequest(0.0, 1, 1).line(), "here") == TraceRequest(0.0, 1, 1)
