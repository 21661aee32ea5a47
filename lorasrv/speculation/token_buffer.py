"""Token buffer: the tokens of one text as a growing numpy array."""

from collections.abc import Sequence

import numpy as np

from lorasrv.speculation.text_match import Tokens

MIN_ROOM = 64


class TokenBuffer:
    """Hold tokens as int32; appending is amortized."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._size = len(tokens)
        self._array = np.empty(max(MIN_ROOM, self._size + self._size // 4), np.int32)
        self._array[: self._size] = tokens

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Return the size in memory."""
        return self._array.nbytes

    @property
    def tokens(self) -> Tokens:
        """Return a view of the tokens."""
        return self._array[: self._size]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        size = self._size + len(tokens)
        if size > len(self._array):
            array = np.empty(2 * size, np.int32)
            array[: self._size] = self.tokens
            self._array = array
        self._array[self._size : size] = tokens
        self._size = size
