"""Count draft tokens that steps have verified, and compare their expected chances with the results."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lorasrv.scheduler_output import path_along
from lorasrv.speculation.proposal import Proposal
from sgmv_kernels.metadata.draft_trees import depths_of


@dataclass(slots=True)
class DraftCounts:
    """Count draft tokens of one drafter by depth: 1 follows the last known token."""

    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def drafted(self) -> int:
        """Return the number of verified tokens."""
        return self.drafted_at.total()

    @property
    def accepted(self) -> int:
        """Return the number of draft tokens that became part of answers."""
        return self.accepted_at.total()


@dataclass(slots=True)
class Calibration:
    """Count verified draft tokens by their expected chance: that the token and those before it are right."""

    # By tenth of the chance, 0 for chances below 0.1.
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    # Sums of the chances.
    expected: dict[int, float] = field(default_factory=dict)

    def observe(self, chance: float, *, was_right: bool) -> None:
        """Count a verified token."""
        tenth = min(int(10 * chance), 9)
        self.drafted[tenth] += 1
        self.accepted[tenth] += was_right
        self.expected[tenth] = self.expected.get(tenth, 0.0) + chance


class DraftAccounts:
    """Count verified draft tokens by drafter and by expected chance. Written by the engine thread only."""

    def __init__(self, drafters: Sequence[str]) -> None:
        self.by_drafter = {name: DraftCounts() for name in drafters}
        self.calibration = Calibration()

    def observe(self, verified: Proposal, new_token_ids: Sequence[int]) -> None:
        """Count the draft tokens of a step; `new_token_ids` are the tokens that it added to the answer."""
        right = set(path_along(verified.token_ids, verified.parents, new_token_ids))
        depths = depths_of(verified.parents)
        for at, (name, depth, chance) in enumerate(zip(verified.drafters, depths, verified.survival, strict=True)):
            counts, was_right = self.by_drafter[name], at in right
            counts.drafted_at[depth] += 1
            counts.accepted_at[depth] += was_right
            self.calibration.observe(chance, was_right=was_right)
