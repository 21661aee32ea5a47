"""Steps as frames: what a rank needs to build the same batch as rank 0. Only numbers, no text and no histories.

An adapter in a step is given by the number of its layout and its runs of pages, which determine its panels.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from adapter_store.spec import AdapterKey
from lorasrv.distributed.frames import Array, Frame
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    NO_DRAFTS,
    AdapterOrders,
    CopyPages,
    DropSwap,
    PageCopy,
    PageOp,
    PlannedDrafts,
    ProbeTree,
    ScheduledRequest,
    SchedulerOutput,
    SlotMoves,
    SwapIn,
    SwapOut,
)
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

STEP, PAGES, SLOTS = "step", "pages", "slots"
_DEFAULTS = SamplingParams()
Places = Callable[[int, tuple[Run, ...]], PlacedAdapter]
"""Return where an adapter lies, from the number of its layout and its runs of pages."""


def encode_step(step: SchedulerOutput, number_of: Callable[[AdapterLayout], int]) -> Frame:
    """Return a step whose tokens are all known.

    Args:
        number_of: returns the number by which the ranks know a layout.
    """
    requests = sorted(step.requests, key=lambda scheduled: scheduled.adapter_key or "")
    keys = sorted({key for s in requests for key, _ in s.terms})
    index = {key: i for i, key in enumerate(keys)}
    placed = [step.placements[key] for key in keys]
    facts = [
        (
            *(
                len(scheduled.token_ids),
                len(scheduled.page_table),
                scheduled.start,
                len(scheduled.terms),
                scheduled.samples,
            ),
            *(scheduled.prompt_rows.start, scheduled.prompt_rows.stop),
            *(len(scheduled.drafts.token_ids), len(scheduled.drafts.parents), len(scheduled.drafts.probes.token_ids)),
            scheduled.active_from,
        )
        for scheduled in requests
    ]
    parents = [parent for s in requests for parent in (*s.drafts.parents, *s.drafts.probes.parents)]
    arrays = (
        np.array(facts, dtype=np.int64).reshape(len(requests), -1),
        np.array([token for s in requests for token in s.token_ids], dtype=np.int64),
        np.concatenate([np.zeros(0, dtype=np.int32), *(np.array(s.page_table, dtype=np.int32) for s in requests)]),
        np.array(parents, dtype=np.int32),
        np.array([(number_of(place.layout), len(place.runs)) for place in placed], dtype=np.int64).reshape(-1, 2),
        np.array([run for place in placed for run in place.runs], dtype=np.int64).reshape(-1, 2),
        np.array([index[key] for s in requests for key, _ in s.terms], dtype=np.int64),
        np.array([weight for s in requests for _, weight in s.terms], dtype=np.float64),
    )
    return Frame(STEP, {}, arrays)


def decode_step(frame: Frame, place: Places) -> SchedulerOutput:
    """Return a step with all that a forward pass needs; keys of adapters and requests sort as on rank 0."""
    facts, tokens, pages, parents, adapters, runs, owners, weights = frame.arrays
    keys = [AdapterKey(f"{i:08}") for i in range(len(adapters))]
    of_adapters = _split(runs, adapters[:, 1].tolist())
    placements = {
        key: place(number, tuple((int(first), int(count)) for first, count in own.tolist()))
        for key, number, own in zip(keys, adapters[:, 0].tolist(), of_adapters, strict=True)
    }
    lengths = facts.T.tolist()
    terms = [(keys[owner], weight) for owner, weight in zip(owners.tolist(), weights.tolist(), strict=True)]
    num_parents = [own + probes for own, probes in zip(lengths[8], lengths[9], strict=True)]
    requests = [
        _share(number, known, own_tokens.tolist(), own_pages.tolist(), own_parents.tolist(), tuple(own_terms))
        for number, known, own_tokens, own_pages, own_parents, own_terms in zip(
            range(len(facts)),
            facts.tolist(),
            _split(tokens, lengths[0]),
            _split(pages, lengths[1]),
            _split(parents, num_parents),
            _split(terms, lengths[3]),
            strict=True,
        )
    ]
    return SchedulerOutput(tuple(requests), placements, (), AdapterOrders(), 0)


def _share(
    number: int,
    facts: Sequence[int],
    tokens: Sequence[int],
    pages: Sequence[int],
    parents: Sequence[int],
    terms: tuple[tuple[AdapterKey, float], ...],
) -> ScheduledRequest:
    _, _, start, _, samples, asked, asked_end, num_drafts, num_parents, num_probes, active_from = facts
    drafts, known = NO_DRAFTS, len(tokens) - num_drafts - num_probes
    if num_drafts or num_probes:
        probes = ProbeTree(tuple(tokens[known + num_drafts :]), tuple(parents[num_parents:]))
        drafts = PlannedDrafts(
            tuple(tokens[known : known + num_drafts]), parents=tuple(parents[:num_parents]), probes=probes
        )
    return ScheduledRequest(
        request_id=RequestId(""),
        token_ids=tuple(tokens),
        start=start,
        page_table=tuple(pages),
        adapter_key=AdapterKey(f"{number:08}") if terms else None,
        samples=bool(samples),
        sampling=_DEFAULTS,
        num_generated=0,
        prompt_rows=range(asked, asked_end),
        drafts=drafts,
        active_from=active_from,
        summed=terms,
    )


def encode_page_op(op: PageOp, number_of: Callable[[RequestId], int]) -> Frame:
    """Return the frame of a page operation, with numbers in place of request ids."""
    match op:
        case CopyPages():
            return Frame(PAGES, {"op": "copy"}, [np.array(op.copies, dtype=np.int64).reshape(-1, 2)])
        case SwapOut() | SwapIn():
            name = "out" if isinstance(op, SwapOut) else "in"
            return Frame(PAGES, {"op": name, "request": number_of(op.request_id)}, [np.array(op.pages, dtype=np.int64)])
        case DropSwap():
            return Frame(PAGES, {"op": "drop", "request": number_of(op.request_id)})


def decode_page_op(frame: Frame) -> PageOp:
    """Return the operation of a frame."""
    kind, request = frame.fields["op"], RequestId(str(frame.fields.get("request", "")))
    if kind == "copy":
        return CopyPages(tuple(PageCopy(source, target) for source, target in frame.arrays[0].tolist()))
    if kind == "drop":
        return DropSwap(request)
    pages = tuple(frame.arrays[0].tolist())
    return SwapOut(request, pages) if kind == "out" else SwapIn(request, pages)


def encode_moves(moves: Sequence[SlotMoves]) -> Frame:
    """Return moves of keys and values of sequences."""
    sizes = [(len(move.page_table), len(move.sources)) for move in moves]
    return Frame(
        SLOTS,
        {},
        [
            np.array(sizes, dtype=np.int64).reshape(-1, 2),
            _ints(page for move in moves for page in move.page_table),
            _ints(slot for move in moves for slot in move.sources),
            _ints(slot for move in moves for slot in move.targets),
        ],
    )


def decode_moves(frame: Frame) -> list[SlotMoves]:
    """Return the moves of a frame."""
    sizes, tables, sources, targets = frame.arrays
    lengths, counts = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    split = zip(_split(tables, lengths), _split(sources, counts), _split(targets, counts), strict=True)
    return [SlotMoves(*(tuple(part.tolist()) for part in parts)) for parts in split]


def _ints(values: Iterable[int]) -> Array:
    return np.array(list(values), dtype=np.int64)


def _split(array: Array | Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Split an array into consecutive parts of these lengths."""
    return [array[first:end] for first, end in pairwise([0, *accumulate(lengths)])]
