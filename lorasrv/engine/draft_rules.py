"""Draft rules: whether and how the answer to a request may be drafted."""

from dataclasses import dataclass, replace

from lorasrv.kv_policy import KvPolicy
from lorasrv.request import TokenConstraint
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.speculation_params import (
    LONG_SIGHTED_DRAFTERS,
    MODEL_DRAFTERS,
    REJECTION,
    SAME_DRAW,
    SpeculationParams,
)


@dataclass(frozen=True, slots=True)
class DraftRules:
    """Decide how a server's drafters may be used for a request."""

    # Whether drafts of requests without a seed are accepted by rejection sampling.
    may_reject: bool = False
    # Tokens that the base's Medusa heads draft.
    num_draft_heads: int = 0
    # Names of the server's drafters.
    drafters: frozenset[str] = frozenset()

    def accept(self, sampling: SamplingParams, constraint: TokenConstraint | None) -> str | None:
        """Return how drafts of a request are accepted. Rejection sampling is not used with a seed, because the text
        may depend on nothing else, or with a constraint, which would cut wrong drafts."""
        if not self.may_reject:
            return None
        return SAME_DRAW if sampling.is_greedy or sampling.seed is not None or constraint is not None else REJECTION

    def why_not_drafted(
        self,
        speculation: SpeculationParams,
        num_heads: int,
        beams: BeamOptions | None,
        policy: KvPolicy | None,
        *,
        has_own_tokens: bool,
    ) -> str | None:
        """Return why a request's answer is not drafted although it asks for drafts; None otherwise.

        Args:
            num_heads: tokens that the Medusa heads of the base or of its adapter draft.
            has_own_tokens: whether its answer may contain tokens that the base lacks.
        """
        if not speculation.max_draft:
            return None
        if not self.drafters:
            return "speculation off"
        if beams is not None:
            return "beam search"
        if policy is not None and not policy.may_draft:
            return f"kv_policy {policy.kind}"
        there = self.drafters if num_heads else self.drafters - {"medusa"}
        there = there if policy is None else there - LONG_SIGHTED_DRAFTERS
        there = there.difference(MODEL_DRAFTERS) if has_own_tokens else there
        asked = speculation.drafters or ({"prediction"} if speculation.prediction else set())
        return "no such drafter" if asked and not asked & there else None


NOTHING_DRAFTS = DraftRules()


def restrict(speculation: SpeculationParams, policy: KvPolicy | None, *, has_own_tokens: bool) -> SpeculationParams:
    """Return the options without what a policy, or tokens that draft models do not know, rule out."""
    speculation = speculation.without(frozenset(MODEL_DRAFTERS)) if has_own_tokens else speculation
    if policy is None:
        return speculation
    return speculation.without(LONG_SIGHTED_DRAFTERS) if policy.may_draft else replace(speculation, max_draft=0)
