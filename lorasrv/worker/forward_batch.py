"""Forward batch: the tensors of one forward pass, built from a scheduled step. Built anew for every step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.spec import AdapterKey
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import BASE, build_segments
from sgmv_kernels.ops import Ops, StepTables


@dataclass(frozen=True)
class ForwardBatch:
    """Hold T rows of B sequences, those of one adapter together.

    Logits are computed for the last `num_logit_rows` rows of each of `sampled`, then for the `prompt_rows` of `asked`.
    """

    # int64 [T].
    token_ids: Tensor
    # int64 [T].
    positions: Tensor
    tables: StepTables
    sampled: tuple[ScheduledRequest, ...]
    asked: tuple[ScheduledRequest, ...] = ()


def build_batch(step: SchedulerOutput, memory: DevicePool, adapter_dtype: torch.dtype, ops: Ops) -> ForwardBatch:
    """Order the sequences by adapter, so that a segment is a range of rows, and lay out their tokens."""
    page_size = memory.page_size
    scheduled, keys = by_adapter(step)
    index = {key: i for i, key in enumerate(keys)}
    lens = np.array([len(s.token_ids) for s in scheduled])
    starts = np.array([s.start for s in scheduled])
    tables = _page_tables(scheduled)
    positions = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens) + np.repeat(starts, lens)
    rows = [BASE if s.adapter_key is None else index[s.adapter_key] for s in scheduled]
    samples = np.array([s.samples for s in scheduled])
    token_ids = np.array([t for s in scheduled for t in s.token_ids])
    firsts = np.cumsum(lens) - lens
    asked = [firsts[i] + np.array(s.prompt_rows) for i, s in enumerate(scheduled) if s.prompt_rows]
    wanted = np.concatenate([_logit_rows(scheduled, firsts + lens, samples), *asked])
    ids, places, sample_rows = upload([token_ids, positions, wanted], memory.device)

    attention = ops.plan_attention(tables, lens.tolist(), (starts + lens).tolist(), page_size, memory.num_pages)
    segments = build_segments(np.repeat(np.array(rows, dtype=np.int32), lens))
    lora = ops.plan_sgmv(segments, [step.placements[key] for key in keys], adapter_dtype)
    return ForwardBatch(
        token_ids=ids,
        positions=places,
        tables=StepTables(attention, lora, sample_rows),
        sampled=tuple(s for s in scheduled if s.samples),
        asked=tuple(s for s in scheduled if s.prompt_rows),
    )


def _logit_rows(
    scheduled: list[ScheduledRequest], ends: npt.NDArray[np.int64], samples: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows [S] whose logits predict next tokens, those of a sequence together; `ends` is the row behind
    each sequence."""
    if not any(s.draft_token_ids for s in scheduled):
        return (ends - 1)[samples]
    rows = [np.arange(end - s.num_logit_rows, end) for s, end in zip(scheduled, ends.tolist(), strict=True)]
    return np.concatenate(rows)


def by_adapter(step: SchedulerOutput) -> tuple[list[ScheduledRequest], list[AdapterKey]]:
    """Return a step's sequences in the order of their rows, and its adapters in the order of their segments."""
    scheduled = sorted(step.scheduled, key=lambda s: s.adapter_key or "")
    return scheduled, sorted({s.adapter_key for s in scheduled if s.adapter_key is not None})


def _page_tables(scheduled: list[ScheduledRequest]) -> npt.NDArray[np.int32]:
    tables = np.zeros((len(scheduled), max(len(s.page_table) for s in scheduled)), dtype=np.int32)
    for row, s in zip(tables, scheduled, strict=True):
        row[: len(s.page_table)] = s.page_table
    return tables
