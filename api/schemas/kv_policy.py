"""Define the field that says which keys and values the tokens of a request see."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.base import ClosedBody
from lorasrv.kv_policy import DEFAULT_SINK, MAX_TOKENS, KvPolicy

_Size = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class KvPolicyBody(ClosedBody):
    """Let each token see the first `sink` tokens (16) and the `recent` ones before it only; the others are dropped.

    Sizes are rounded up to whole pages of 16 tokens; `recent` is at least 64.
    """

    kind: Literal["window"]
    recent: _Size
    sink: _Size | None = None

    @property
    def policy(self) -> KvPolicy:
        """Return the engine's policy."""
        return KvPolicy(self.recent, DEFAULT_SINK if self.sink is None else self.sink, self.kind)
