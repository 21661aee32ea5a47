"""Model drafter: when a model on the worker drafts, and how many tokens.

A model drafts at the end of a step, after the step's new tokens; the next step verifies the drafts that still pay off.
Unlike those of other drafters, its drafts cost time before they are known. So they are requested only if they are
expected to pay off, and otherwise now and then to find out: the answers of an adapter may differ so much from the draft
model that its drafts never pay off.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from adapter_store.spec import AdapterKey
from lorasrv.request import Request
from lorasrv.scheduler_output import DrafterOutput, ModelDraft
from lorasrv.speculation.draft_lengths import PlainStep, RowDraft, choose_lengths
from lorasrv.speculation.drafter import Draft
from lorasrv.speculation.survival import SurvivalTable

PROBE_EVERY, MAX_PROBE_EVERY = 64, 4096
"""Tokens of an adapter's answers between two trials of a draft that is not expected to pay off, initially and at
most."""
PROBED_TOKENS = 3
GUESSED_PASS_SHARE: Mapping[str, float] = {"medusa": 0.1}
OTHER_PASS_SHARE = 0.5
"""Assumed duration of a pass before any was measured, as a share of a step's; a pass drafts one token."""
NUM_NEWEST = 7
"""Number of newest measured passes of which the median is used."""
CONFIDENCE_CLASSES = 8
MAX_PROBES = 1 << 12


@dataclass(slots=True)
class _Probe:
    every: int = PROBE_EVERY
    left: int = 0
    # Whether the last trial yielded no token.
    is_silent: bool = False


class ModelDrafter:
    """Choose how many tokens a model drafts for each answer. Called by the engine thread only.

    Args:
        name: name of the drafter, here and on the worker.
    """

    def __init__(self, name: str, survival: SurvivalTable) -> None:
        self.name = name
        self._survival = survival
        # Seconds of a pass, by the number of rows as a power of two.
        self._pass_s: dict[int, deque[float]] = {}
        self._probes: LRUCache[AdapterKey | None, _Probe] = LRUCache(MAX_PROBES)

    def lengths(
        self, rows: Sequence[tuple[Request, int]], draws: Sequence[str], token_s: Sequence[float], step: PlainStep
    ) -> list[int]:
        """Return how many tokens to draft for each row.

        Args:
            rows: answers, and the most tokens of each, at least 1. For answers with a pending token, no drafts are
                requested yet.
            draws: how each answer chooses its tokens.
            token_s: seconds that verifying one token of each answer adds to a step.
            step: the step without drafts.
        """
        pass_s = self._expected_s(len(rows), step) / len(rows)
        drafts = [
            RowDraft(self._chances(request, draw, most), seconds + pass_s)
            for (request, most), draw, seconds in zip(rows, draws, token_s, strict=True)
        ]
        lengths = choose_lengths(drafts, step, sum(most for _, most in rows))
        return [
            self._probed(request.adapter_key, min(most, PROBED_TOKENS), length, is_asked=not request.num_pending_tokens)
            for (request, most), length in zip(rows, lengths, strict=True)
        ]

    def observe_depth(self, request: Request, draw: str, depth: int, *, was_right: bool) -> None:
        """Learn whether token number `depth` of a draft was right; those before it were."""
        self._survival.observe(self.name, request.adapter_key, (draw, ("depth", depth)), was_right=was_right)

    def observe_draft(self, adapter: AdapterKey | None, draft: ModelDraft) -> None:
        """Learn whether the model drafted any token for an answer of an adapter."""
        probe = self._probes.setdefault(adapter, _Probe())
        if not draft.token_ids and not probe.is_silent:
            probe.left = probe.every
        probe.is_silent = not draft.token_ids

    def observe(self, output: DrafterOutput) -> None:
        """Learn how long drafting took."""
        if output.num_passes:
            newest = self._pass_s.setdefault(len(output.drafts).bit_length(), deque(maxlen=NUM_NEWEST))
            newest.append(output.seconds / output.num_passes)

    def _expected_s(self, num_rows: int, step: PlainStep) -> float:
        """Return the seconds of a pass, taken from the nearest measured number of rows."""
        if not self._pass_s:
            return GUESSED_PASS_SHARE.get(self.name, OTHER_PASS_SHARE) * step.seconds
        return statistics.median(self._pass_s[min(self._pass_s, key=lambda rows: abs(rows - num_rows.bit_length()))])

    def _chances(self, request: Request, draw: str, most: int) -> list[float]:
        chances, chance = [], 1.0
        for depth in range(most):
            chance *= self._survival.estimate(self.name, request.adapter_key, (draw, ("depth", depth)))
            chances.append(chance)
        return chances

    def _probed(self, adapter: AdapterKey | None, tried: int, length: int, *, is_asked: bool) -> int:
        """Return the length; if it is 0, return a few tokens now and then as a trial. A trial stays due until it is
        requested."""
        probe = self._probes.setdefault(adapter, _Probe())
        if length and not probe.is_silent:
            probe.every = probe.left = PROBE_EVERY
            return length
        probe.left -= 1
        if probe.left > 0:
            return 0
        if not is_asked:
            return tried
        probe.left = probe.every
        probe.every = min(MAX_PROBE_EVERY, 2 * probe.every)
        return tried


def as_draft(token_ids: Sequence[int], confidence: Sequence[float], *, sees_tokens: bool) -> Draft:
    """Return a model's draft.

    Args:
        confidence: probability that the model gave to each token.
        sees_tokens: whether the evidence of a token is how sure the model was of it and of those before it. Otherwise
            it is only its place: for rejection sampling, the choice of tokens to try must not depend on the tokens.
    """
    if not sees_tokens:
        return Draft(tuple(token_ids), tuple(("depth", depth) for depth in range(len(token_ids))))
    evidence, product = [], 1.0
    for share in confidence:
        product *= share
        evidence.append((int(CONFIDENCE_CLASSES * share * 0.999), int(CONFIDENCE_CLASSES * product * 0.999)))
    return Draft(tuple(token_ids), tuple(evidence))
