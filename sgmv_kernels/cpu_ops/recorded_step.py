"""Recordings of a model's forward pass on the CPU, made once and run for every step.

Passes differ only in their rows and tables. A pass is therefore recorded for the largest number of rows, with and
without adapters, and each run gets the step's own numbers (`cpu_runtime.launch`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_ops.attention import PART as ATTENTION
from sgmv_kernels.cpu_ops.attention import sequences_part
from sgmv_kernels.cpu_ops.page_mass import PART as OBSERVED
from sgmv_kernels.cpu_ops.page_mass import masses_part
from sgmv_kernels.cpu_ops.pointwise import SAMPLED, TAKEN, rope_name, rope_part, taken_part
from sgmv_kernels.cpu_ops.weight_rows import PART as LOOKED_UP
from sgmv_kernels.cpu_ops.weight_rows import ids_part
from sgmv_kernels.cpu_runtime.launch import ROWS, Program, Words, recording
from sgmv_kernels.cpu_runtime.team import team_size
from sgmv_kernels.forward_pass import Angles, ProgramShape, Stages, StepTables
from sgmv_kernels.metadata.plans import AttentionPlan, PageMasses, SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables, rankless_tables


class StepKind(NamedTuple):
    """Tell which launches a step needs."""

    # Passes over adapters: the most terms of a row's adapter.
    num_passes: int
    # Whether an adapter has vectors.
    has_vectors: bool = False
    # Whether the panels of an adapter are int8 codes.
    has_codes: bool = False
    # Whether the attention of rows is observed.
    has_masses: bool = False


USUAL = (StepKind(0), StepKind(1))
"""Kinds of steps that are recorded with the first step, so that no adapter's first request waits for a recording."""


class Planner(Protocol):
    """Make the plans that recording needs; implemented by `sgmv_kernels.ops.Ops`."""

    def plan_tables(self, tables: SgmvTables, dtype: torch.dtype) -> SgmvPlan: ...

    def plan_attention(
        self,
        page_tables: Int32,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_size: int,
        num_pages: int,
    ) -> AttentionPlan: ...


PassResult = tuple[Tensor, Tensor | None]
"""Logits [S, V], and the likeliest token of each row [S] int64, if the pass has computed these."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """Hold a pass recorded for the largest number of rows, with its inputs and outputs."""

    program: Program
    x: Tensor
    logits: Tensor
    likeliest: Tensor
    # The number of launches before those that choose the likeliest tokens.
    up_to_logits: int


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """Hold a pass that can begin as soon as its input is known, and the arrays that its launches point to."""

    # None: the pass is not recorded.
    recording: _Recording | None
    # Token ids [T]; None: the pass begins with embedded tokens.
    ids: Tensor | None
    # Whether the pass ends with the likeliest tokens.
    chooses: bool
    angles: Angles
    tables: StepTables

    @property
    def program(self) -> Program | None:
        return None if self.recording is None else self.recording.program


class RecordedStep:
    """Run the stages of a forward pass from recordings, with the same results as calls."""

    def __init__(self, stages: Stages, shape: ProgramShape, planner: Planner) -> None:
        self._stages, self._shape, self._planner = stages, shape, planner
        widths = [(shape.max_rows, width) for width in shape.angles]
        self._angles = tuple((torch.empty(size), torch.empty(size)) for size in widths)
        self._recorded: dict[StepKind, _Recording] = {}
        # The pass in progress, with its input.
        self._now: tuple[PreparedPass, Tensor | None] | None = None
        self._result: PassResult | None = None
        self._last: Program | None = None

    @property
    def num_threads(self) -> int:
        """Return the number of threads that compute a pass. The thread that began it may do other work meanwhile."""
        return team_size()

    @property
    def can_embed(self) -> bool:
        """Return whether passes can begin with token ids."""
        return self._stages.embed is not None

    def prepare(
        self, rows: int, angles: Angles, tables: StepTables, ids: Tensor | None = None, *, chooses: bool = False
    ) -> "PreparedPass":
        """Prepare a pass, except its input; another pass may be in progress.

        Args:
            ids: [T] int64, which may be written until the pass begins; None: the pass begins with embedded tokens.
            chooses: whether the pass ends with the likeliest tokens, instead of with unchanged logits.
        """
        if rows > self._shape.max_rows or tables.sample_rows.shape[0] > self._shape.max_samples:
            return PreparedPass(None, ids, chooses, angles, tables)
        lora = tables.lora
        has_codes = any(own.tables.has_codes for own in lora.passes())
        kind = StepKind(lora.num_passes, lora.tables.has_vectors, has_codes, tables.masses is not None)
        for each in (kind, *USUAL):
            held = self._recorded.get(each)
            if held is None or held.program.threads != team_size():
                self._recorded[each] = self._record(each)
        recorded = self._recorded[kind]
        count = None if chooses else recorded.up_to_logits
        recorded.program.prepare(self._parts(rows, angles, tables, ids), count)
        return PreparedPass(recorded, ids, chooses, angles, tables)

    def begin(self, prepared: "PreparedPass", x: Tensor | None = None) -> None:
        """Let the other threads of the team begin the pass that was prepared last; the pass before it must be complete.
        A pass that is not recorded is computed by `settle` or `complete`.

        Args:
            x: embedded tokens [T, H], for a pass without ids.
        """
        self.wait()  # after an interrupt, a pass may still be in progress
        self._now, self._result = (prepared, x), None
        if prepared.recording is not None:
            if x is not None:
                # With NumPy: for a few rows, torch takes ten times as long.
                prepared.recording.x.numpy()[: len(x)] = x.numpy()
            prepared.recording.program.begin()

    def take_part(self, seconds: float) -> None:
        """Compute with the other threads for about `seconds`, at most until the pass is complete."""
        if self._now is not None and (program := self._now[0].program) is not None:
            program.take_part(seconds)

    def wait(self) -> None:
        """Compute with the other threads until a recorded pass is complete; a pass without recording stays pending."""
        if self._now is not None and (program := self._now[0].program) is not None:
            program.complete()

    def settle(self) -> None:
        """Complete the computation of a begun pass; the pages that it reads or writes may be changed afterwards."""
        self.wait()
        if self._now is not None and self._result is None:
            self._result = self._result_of(*self._now)

    def complete(self) -> PassResult:
        """Complete the pass, and return its result in buffers that the next pass overwrites."""
        self.settle()
        assert self._now is not None, "no pass was begun"
        assert self._result is not None
        self._last, self._now = self._now[0].program, None
        return self._result

    @property
    def ended_s(self) -> float:
        """Return when the last pass was complete, by `time.perf_counter`; `complete` may have been called later."""
        return time.perf_counter() if self._last is None else self._last.ended_s

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of the last run by kind of kernel, including the wait for the slowest thread."""
        return {} if self._last is None else self._last.seconds()

    def _result_of(self, prepared: PreparedPass, x: Tensor | None) -> PassResult:
        """Return the result of a complete pass, or compute a pass that is not recorded."""
        stages, ids, tables = self._stages, prepared.ids, prepared.tables
        if (recorded := prepared.recording) is not None:
            count = tables.sample_rows.shape[0]
            return recorded.logits[:count], recorded.likeliest[:count] if prepared.chooses else None
        if ids is not None:
            assert stages.embed is not None
            x = stages.embed(ids)
        assert x is not None
        logits = stages.layers(x, prepared.angles, tables)
        return logits, stages.choose(logits) if prepared.chooses else None

    def _record(self, kind: StepKind) -> _Recording:
        shape = self._shape
        pages = -(-shape.max_rows // shape.page_size)
        attention = self._planner.plan_attention(
            np.zeros((1, pages), dtype=np.int32), [shape.max_rows], [shape.max_rows], shape.page_size, shape.num_pages
        )
        sites, places = shape.sites if kind.num_passes else (), shape.places if kind.has_vectors else ()
        lora = None
        for turn in reversed(range(max(1, kind.num_passes))):
            tables = rankless_tables(sites, shape.num_layers, shape.max_rows, places, turn, has_codes=kind.has_codes)
            lora = replace(self._planner.plan_tables(tables, shape.adapter_dtype), next=lora)
        assert lora is not None
        sampled = torch.zeros(shape.max_samples, dtype=torch.int64)
        observed = PageMasses(np.ones(1, dtype=np.int32), torch.zeros((shape.num_kv_heads, 1, pages)))
        masses = observed if kind.has_masses else None
        embed, ids = self._stages.embed, torch.zeros(shape.max_rows, dtype=torch.int64)
        with recording() as recorded:
            x = torch.empty((shape.max_rows, shape.hidden_size)) if embed is None else embed(ids)
            logits = self._stages.layers(x, self._angles, StepTables(attention, lora, sampled, masses))
            up_to_logits = len(recorded.launches)
            likeliest = self._stages.choose(logits)
        return _Recording(Program(recorded), x, logits, likeliest, up_to_logits)

    def _parts(self, rows: int, angles: Angles, tables: StepTables, ids: Tensor | None) -> dict[str, Words]:
        shape, attention = self._shape, tables.attention
        sequences = sequences_part(attention, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        parts: dict[str, Words] = {
            ROWS: {NUM_ROWS: rows},
            SAMPLED: {NUM_ROWS: tables.sample_rows.shape[0]},
            TAKEN: taken_part(tables.sample_rows).words,
            ATTENTION: sequences.words,
            # With 0 rows, the lookup does nothing.
            LOOKED_UP: {NUM_ROWS: 0} if ids is None else ids_part(ids).words,
        }
        if tables.masses is not None:
            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            parts[OBSERVED] = masses_part(tables.masses, attention, *heads).words
        for (recorded, _), (cos, sin) in zip(self._angles, angles, strict=True):
            rope = rope_part(rows, cos, sin, attention.write_pages, attention.write_slots)
            parts[rope_name(recorded)] = rope.words
        for own in tables.lora.passes():
            for part in own.prepared.parts:
                parts[part.name] = part.words
            if (vectors := own.prepared.vectors) is not None:
                parts[vectors.name] = vectors.words
        return parts
