"""What choosing a token of one row depends on."""

from collections.abc import Sequence
from typing import NamedTuple

from lorasrv.constraint import ConstraintState
from lorasrv.sampling import SamplingParams
from lorasrv.step import ScheduledRequest


class SamplingRow(NamedTuple):
    """One row of logits: how to choose, and what has come so far.

    `num_generated` tokens of the answer exist: the row's position in the seed's random stream; they are the last of
    `history`, which begins with the prompt.
    """

    params: SamplingParams
    num_generated: int = 0
    history: Sequence[int] = ()
    constraint: ConstraintState | None = None

    @classmethod
    def of(cls, share: ScheduledRequest) -> "SamplingRow":
        """The row of a request's last token."""
        return cls(share.sampling, share.num_generated, share.history, share.constraint)

    @property
    def is_early(self) -> bool:
        """Whether the answer may not end yet."""
        return self.num_generated < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether the row asks for anything that `logit_adjustments` does."""
        return self.params.changes_logits or self.constraint is not None or self.is_early

    @property
    def generated(self) -> Sequence[int]:
        """The answer so far."""
        return self.history[len(self.history) - self.num_generated :]
