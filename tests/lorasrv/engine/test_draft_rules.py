"""Why an answer is not drafted, as usage says it."""

import pytest

from lorasrv.engine.draft_rules import NOTHING_DRAFTS, DraftRules
from lorasrv.sampling_params import BeamOptions
from lorasrv.speculation_params import ANY_SPECULATION, NO_SPECULATION, SpeculationParams

LOOKUP = DraftRules(drafters=frozenset({"lookup"}))
NAMED = SpeculationParams(drafters=frozenset({"corpus"}))


@pytest.mark.parametrize("asked", [ANY_SPECULATION, NAMED, SpeculationParams(prediction="a text")])
@pytest.mark.parametrize("beams", [None, BeamOptions(2)])
def test_a_server_that_never_drafts_says_so(asked: SpeculationParams, beams: BeamOptions | None) -> None:
    """Whatever else would be in the way."""
    assert NOTHING_DRAFTS.why_not_drafted(asked, 0, beams, None, has_own_tokens=False) == "speculation off"


@pytest.mark.parametrize(
    ("rules", "asked", "beams", "why"),
    [
        (NOTHING_DRAFTS, NO_SPECULATION, None, None),
        (LOOKUP, ANY_SPECULATION, None, None),
        (LOOKUP, NAMED, None, "no such drafter"),
        (LOOKUP, ANY_SPECULATION, BeamOptions(2), "beam search"),
    ],
)
def test_others_say_what_is_in_the_way(
    rules: DraftRules, asked: SpeculationParams, beams: BeamOptions | None, why: str | None
) -> None:
    assert rules.why_not_drafted(asked, 0, beams, None, has_own_tokens=False) == why
