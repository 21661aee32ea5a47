"""Frames between ranks: plain data, the same on arrival, and refused when damaged; steps, page operations, moves."""

import ast
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lorasrv.distributed
from adapter_store.spec import AdapterKey
from lorasrv.distributed.frames import DTYPES, Frame, Link, LinkClosed
from lorasrv.distributed.rank_adapters import LayoutNumbers, RankPlaces
from lorasrv.distributed.step_frames import (
    decode_moves,
    decode_page_op,
    decode_step,
    encode_moves,
    encode_page_op,
    encode_step,
)
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    AdapterOrders,
    CopyPages,
    DropSwap,
    PageCopy,
    PlannedDrafts,
    ProbeTree,
    ScheduledRequest,
    SchedulerOutput,
    SlotMoves,
    SwapIn,
    SwapOut,
)
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PAGE_BYTES = 4096


def sent(frame: Frame) -> Frame:
    return Frame.decode(bytearray(b"".join(frame.encode())))


@given(
    fields=st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=9), st.none(), st.floats(0))),
    arrays=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), max_size=4
    ),
)
def test_a_frame_arrives_as_it_was_sent(fields: dict[str, object], arrays: list[tuple[str, list[int]]]) -> None:
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 100, shape).astype(dtype) for dtype, shape in arrays]
    found = sent(Frame("kind", fields, made))
    assert (found.kind, found.fields) == ("kind", fields)
    assert [(a.dtype, a.shape) for a in found.arrays] == [(a.dtype, a.shape) for a in made]
    assert all(map(np.array_equal, found.arrays, made))


def test_damaged_frames_are_refused() -> None:
    whole = b"".join(Frame("kind", {}, [np.arange(6)]).encode())
    for damaged in (
        whole[:-1],
        whole.replace(b"int64", b"obj_0"),
        whole.replace(b"int64", b"ob\njO"),
        whole.replace(b", 6]", b",-6]"),
        whole.replace(b", 6]", b",6.]"),
        b"no line",
        b"[]\n",
    ):
        with pytest.raises((ValueError, TypeError)):
            Frame.decode(bytearray(damaged))


def test_objects_do_not_travel() -> None:
    with pytest.raises(AssertionError, match="cannot carry"):
        Frame("kind", {}, [np.array([object()])]).encode()
    with pytest.raises(TypeError, match="not JSON serializable"):
        Frame("kind", {"x": object()}).encode()


def test_nothing_of_the_room_reads_code() -> None:
    """No pickle, and none of what pickles behind a caller's back."""
    folder = Path(lorasrv.distributed.__file__).parent
    names = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            names |= {node.id} if isinstance(node, ast.Name) else set()
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
    assert not names & {"pickle", "marshal", "shelve", "dill", "eval", "exec", "load", "loads_object", "dumps_object"}
    assert not {name for name in names if "object" in name and name != "object"}


def test_a_link_carries_frames_in_order_and_tells_its_end() -> None:
    ours, theirs = socket.socketpair()
    here, there = Link(ours), Link(theirs)
    large = np.arange(3_000_000)
    sender = threading.Thread(target=lambda: [here.send(Frame(str(i), {}, [large[: 10**i]])) for i in range(7)])
    sender.start()
    sizes = [(frame.kind, frame.arrays[0].size) for frame in (there.receive() for _ in range(7))]
    sender.join()
    assert sizes == [(str(i), min(10**i, 3_000_000)) for i in range(7)]
    here.close()
    with pytest.raises(LinkClosed):
        there.receive()
    with pytest.raises(LinkClosed):
        [there.send(Frame("x")) for _ in range(3)]
    there.close()


LAYOUT = AdapterLayout((SiteDims(16, (16, 8)),), (((4, 2),), ((4, 0),)), 4)
PARENTS = st.sampled_from([(), (-1, 0, 0), (-1, -1, 1)])


SUMS = {"0": (("c", 0.1), ("a", 1.0)), "z": (("a", 1.0), ("b", -0.5)), "ab": (("b", 0.3),)}
"""Terms of sums, whose keys sort unlike those of their terms."""


@st.composite
def requests(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Requests of a step: chunks of prompts, single tokens, drafts in chains and trees, probes, asked prompt rows."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        known, start = draw(st.integers(1, 5)), draw(st.integers(0, 40))
        samples = draw(st.booleans())
        drafts = PlannedDrafts()
        if samples and draw(st.booleans()):
            parents = draw(PARENTS)
            drafts = PlannedDrafts((7, 8, 9), ("lookup",) * 3, parents=parents)
            if draw(st.booleans()):
                drafts = drafts._replace(probes=ProbeTree((3, 4), (-1, 0)))
        guessed = drafts.token_ids + drafts.probes.token_ids
        tokens = tuple(range(100 * i, 100 * i + known)) + guessed
        asked = range(draw(st.integers(0, known)), known)
        found.append(
            ScheduledRequest(
                request_id=RequestId(f"name-{i}"),
                token_ids=tokens,
                start=start,
                page_table=tuple(range(i, i + -(-(start + len(tokens)) // 4))),
                adapter_key=AdapterKey(adapter) if (adapter := draw(st.sampled_from(["", *"bac", *SUMS]))) else None,
                samples=samples,
                sampling=SamplingParams(temperature=0.5),
                num_generated=3,
                prompt_rows=asked if asked else range(0),
                drafts=drafts,
                active_from=draw(st.integers(0, 50)),
                summed=tuple((AdapterKey(key), weight) for key, weight in SUMS.get(adapter, ())),
            )
        )
    return found


@given(requests())
def test_a_rank_lays_out_the_same_rows(scheduled: list[ScheduledRequest]) -> None:
    runs = {"a": ((3, 2),), "b": ((9, 1), (5, 2)), "c": ((20, 3),)}
    placed = {AdapterKey(name): LAYOUT.place(own, PAGE_BYTES) for name, own in runs.items()}
    step = SchedulerOutput(tuple(scheduled), placed, (), AdapterOrders(), 0)  # type: ignore[arg-type]
    numbers, places = LayoutNumbers(), RankPlaces(PAGE_BYTES)
    places.learn(numbers.of(LAYOUT), LAYOUT)
    frame = encode_step(step, numbers.of)
    assert b"name" not in b"".join(frame.encode())
    here, there = StepRows.of(step), StepRows.of(decode_step(sent(frame), places.place))
    assert here.weights == there.weights
    for name in ("token_ids", "positions", "row_terms", "query_lens", "kv_lens", "page_tables", "logit_rows"):
        assert np.array_equal(getattr(here, name), getattr(there, name)), name
    assert (here.parents, [a.runs for a in here.adapters]) == (there.parents, [a.runs for a in there.adapters])
    for one, other in zip(here.adapters, there.adapters, strict=True):
        assert all(map(np.array_equal, one.offsets, other.offsets))


def test_page_operations_and_moves_arrive() -> None:
    request, number = RequestId("label"), lambda _: 5
    for op in (
        CopyPages((PageCopy(1, 2), PageCopy(3, 4))),
        SwapOut(request, (4, 9)),
        SwapIn(request, (1, 0)),
        DropSwap(request),
    ):
        frame = encode_page_op(op, number)
        assert b"label" not in b"".join(frame.encode())
        found = decode_page_op(sent(frame))
        assert type(found) is type(op)
        for name in ("copies", "pages"):
            assert getattr(found, name, None) == getattr(op, name, None)
        assert getattr(found, "request_id", "5") == "5"
    moves = [SlotMoves((1, 2), (5, 7), (4, 5)), SlotMoves((3,), (), ())]
    assert decode_moves(sent(encode_moves(moves))) == moves
