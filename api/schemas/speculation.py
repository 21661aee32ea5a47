"""Define the fields that control speculative decoding. None of them changes the answer."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from api.schemas.base import Body, ClosedBody, Items
from api.schemas.tools import TextPart
from lorasrv.speculation_params import DRAFTERS, MAX_DRAFT_TOKENS, NO_SPECULATION, SpeculationParams


class SpeculationBody(ClosedBody):
    """Limit drafting to at most `max_draft` tokens per step, and to these `drafters`.

    `remember`: whether later answers of the same adapter and key may be drafted from this answer.
    """

    max_draft: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    drafters: Annotated[Items[str], Field(max_length=len(DRAFTERS))] | None = None
    remember: bool | None = None


def _kind(value: object) -> str:
    return "Switch" if isinstance(value, bool) else "Body"


SpeculationField = Annotated[
    Annotated[bool, Tag("Switch")] | Annotated[SpeculationBody, Tag("Body")], Discriminator(_kind)
]
"""`false` turns speculation off for a request."""


class Prediction(Body):
    """Hold the text that the client expects as the answer, as in OpenAI's API."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        """Return the whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def speculation_params(
    options: SpeculationBody | bool | None, prediction: Prediction | None, *, has_salt: bool
) -> SpeculationParams:
    """Return the engine's options.

    Args:
        has_salt: whether the client sent a `cache_salt`; its answers are then remembered only if `remember` is true.
    Raises:
        InvalidRequest: a drafter is unknown.
    """
    if options is False:
        return NO_SPECULATION
    given = options if isinstance(options, SpeculationBody) else SpeculationBody()
    return SpeculationParams(
        max_draft=MAX_DRAFT_TOKENS if given.max_draft is None else given.max_draft,
        drafters=None if given.drafters is None else frozenset(given.drafters),
        remember=not has_salt if given.remember is None else given.remember,
        prediction="" if prediction is None else prediction.text,
    )
