"""Which tokens may come next, as the engine sees it: no grammar, no text, no torch.

A `TokenConstraint` is compiled before admission and shared by the choices of a request; each choice follows it with a
`ConstraintState` of its own, which only the engine's thread touches.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt


class ConstraintState(Protocol):
    """Where one answer stands. Nothing of it raises.

    `error`: why it cannot be followed any further; the request ends with it.
    """

    error: str | None

    @property
    def is_over(self) -> bool:
        """Nothing but the end may follow."""

    def advance(self, token_id: int) -> None:
        """This token came. It was allowed."""

    def allowed(self) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may come next; at least one may.

        The same buffer every time: to be read before the next call.
        """


class TokenConstraint(Protocol):
    """A compiled grammar."""

    def begin(self) -> ConstraintState:
        """The state before the first token of an answer."""
