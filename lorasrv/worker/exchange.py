"""Exchange: the data between a decoder and the processes that compute other parts of the same pass. This module is the
case of a single process.

`lorasrv.distributed` has the exchanges of a partition. A pass calls in this order: `divide`, `arrive` or nothing, in
each layer `all_rows`, `own_rows`, and `whole` after each part; then `states` and `logits`, or `leave`.
"""

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from lorasrv.scheduler_output import SlotMoves
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels.metadata.plans import AttentionPlan


class SplitOutput(Enum):
    """Name the outputs of which ranks may have parts."""

    ATTENDED = auto()
    OUT = auto()
    GATED = auto()
    DOWN = auto()


class Exchange:
    """Compute everything alone: the exchange of a process that has the whole model."""

    # Whether this process embeds tokens, and whether it computes logits.
    is_first = True
    is_last = True
    # Whether passes may be recorded as graphs; not if they wait for other processes.
    can_record = True
    # Fewest rows of a step that are divided among processes.
    divided_from = 1

    def alone(self) -> "Exchange":
        """Return an exchange with which this process computes its part of a pass, with the same shapes, while the
        others do not: their parts are zeros."""
        return self

    def divide(self, rows: StepRows) -> StepRows:
        """Return the rows of the next pass that this process computes."""
        return rows

    def all_rows(self, qkv: Tensor, own: AttentionPlan) -> tuple[Tensor, AttentionPlan]:
        """Return the rows [T, Q + 2 K] whose keys and values this process keeps, and their tables.

        Args:
            qkv: [own rows, Q + 2 K]. In the result, the Q columns of other processes' rows are undefined.
            own: tables of these rows.
        """
        return qkv, own

    def own_rows(self, q: Tensor) -> Tensor:
        """Return the rows that this process computes, out of all rows."""
        return q

    def arrive(self, num_rows: int) -> Tensor:
        """Return the rows [T, H] as computed by the layers before those of this process."""
        raise AssertionError("no process computes layers before these")

    def whole(self, part: Tensor, place: SplitOutput) -> Tensor:
        """Join the parts of an output for the next linear, by columns or by sums: [T, own] -> [T, inputs]."""
        del place
        return part

    def has_states(self, num_own: int) -> bool:
        """Return whether this process sends or receives states, if `num_own` of its rows need logits."""
        return num_own > 0

    def states(self, own: Tensor) -> Tensor:
        """Return the normed last hidden states [S, H] of all rows that need logits, in a process that computes their
        logits; in other processes, no rows.
        """
        return own

    def logits(self, part: Tensor | None, num_rows: int) -> Tensor:
        """Return all logits [S, V] fp32 in the process that samples; in other processes the result is undefined.

        Args:
            part: logits [S, own] of this process; None if it computes none.
        """
        del num_rows
        assert part is not None
        return part

    def leave(self, x: Tensor) -> None:
        """Send rows [T, H] to the process with the next layers."""
        raise AssertionError("no process computes layers behind these")

    def on_pass_ended(self) -> None:
        """Note that this process's part of a pass is done."""

    def on_slots_moved(self, moves: Sequence[SlotMoves]) -> None:
        """Tell the other processes that keys and values of the last pass have moved to other slots."""


def empty_logits(vocab_size: int, device: torch.device) -> Tensor:
    """Return the logits of a pass that samples nothing."""
    return torch.empty((0, vocab_size), dtype=torch.float32, device=device)
