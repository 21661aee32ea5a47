"""Define the field that selects the keys and values that a request's tokens attend to."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.base import ClosedBody
from lorasrv.kv_policy import MAX_TOKENS, KvPolicy, SelectPolicy, WindowPolicy

_Size = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Policy(ClosedBody):
    sink: _Size | None = None

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, size in self if name != "kind" and size is not None}


class WindowBody(_Policy):
    """Let each token attend only to the first `sink` tokens (default 16) and the last `recent` tokens; drop the others.

    Sizes are rounded up to whole pages of 16 tokens; `recent` is at least 64.
    """

    kind: Literal["window"]
    recent: _Size

    @property
    def policy(self) -> KvPolicy:
        """Return the engine's policy."""
        return WindowPolicy(**self._sizes())


class SelectBody(_Policy):
    """Keep `budget` tokens: the first `sink`, the last `recent`, and the pages with the most attention.

    They are selected at the end of the prompt, and again after every `every` tokens. By default, `sink` is 16, `recent`
    is 128, and `every` is 256.
    """

    kind: Literal["select"]
    budget: _Size
    recent: _Size | None = None
    every: _Size | None = None

    @property
    def policy(self) -> KvPolicy:
        """Return the engine's policy."""
        return SelectPolicy(**self._sizes())


KvPolicyField = Annotated[WindowBody | SelectBody, Field(discriminator="kind")]
