"""Limit the tokens of an answer's reasoning: once they are used up, the closing marker is forced (as in vLLM).

The reasoning is what `ReasoningReader` takes for it. Markers are found in the bytes of tokens, because they may be
spelled in any way.
"""

import codecs
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lorasrv.request import ConstraintState, TokenConstraint
from lorasrv.sampling_params import TextOptions
from lorasrv.text.detokenizer import token_id_bytes
from lorasrv.text.reasoning import Markers
from lorasrv.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningBudget:
    """Implement `TokenConstraint`: the budget of each choice, beside a grammar of the whole answer if there is one."""

    markers: Markers
    # Whether the prompt has begun the reasoning.
    is_open: bool
    # Most tokens between the markers; tokens of an unfinished closing marker count.
    num_tokens: int
    tokenizer: Tokenizer
    # How the answer's tokens become text.
    text: TextOptions
    grammar: TokenConstraint | None = None

    @property
    def ends_answer(self) -> bool:
        return self.grammar is not None and self.grammar.ends_answer

    def begin(self) -> "BudgetState":
        return BudgetState(self, None if self.grammar is None else self.grammar.begin())

    def spelled(self, token_id: int) -> bytes:
        """Return the bytes of a token in the answer's text."""
        return b"" if token_id in self._hidden else token_id_bytes(self.tokenizer, token_id)

    @cached_property
    def end_ids(self) -> list[int]:
        """Return the usual tokens of the closing marker."""
        return self.tokenizer.encode_behind(self.markers.end)

    def grammar_behind(self) -> ConstraintState | None:
        """Return the grammar's state behind reasoning. The text of reasoning is free, so an empty one stands for any,
        even one that ends within a character."""
        if self.grammar is None:
            return None
        state = self.grammar.begin()
        for token in (*([] if self.is_open else self.tokenizer.encode_behind(self.markers.begin)), *self.end_ids):
            state.advance(token)
        return state

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return self.text.hidden(self.tokenizer.special_ids)


class BudgetState:
    """Implement `ConstraintState`: the reasoning of one answer so far.

    Args:
        grammar: that of the answer so far. It does not see a marker that is forced.
    """

    def __init__(self, budget: ReasoningBudget, grammar: ConstraintState | None) -> None:
        self._budget, self._grammar = budget, grammar
        self._begin, self._end = budget.markers.begin, budget.markers.end.encode()
        # Whether reasoning may still begin, and whether it has begun and not ended.
        self._may_begin, self._is_within = not budget.is_open, budget.is_open
        # The text that may be part of a marker.
        self._held = b""
        self._num_left = budget.num_tokens
        self._last: list[int] = []

    @property
    def error(self) -> str | None:
        return None if self._grammar is None else self._grammar.error

    @property
    def is_over(self) -> bool:
        return self._grammar is not None and self._grammar.is_over

    @property
    def num_free(self) -> int:
        return max(0, self._num_left) + self._may_begin if self._grammar is None else 0

    @property
    def rest(self) -> ConstraintState | None:
        return self if self._may_begin or self._is_within else self._grammar

    def advance(self, token_id: int) -> None:
        is_forced = bool(self._closing())
        if self._may_begin or self._is_within:
            self._read(token_id)
        if is_forced and not self._is_within:
            self._grammar = self._budget.grammar_behind()
        elif not is_forced and self._grammar is not None:
            self._grammar.advance(token_id)

    def forced(self) -> list[int]:
        return self._closing() or ([] if self._grammar is None else [*self._grammar.forced()])

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._num_left >= len(token_ids):
            # None of them is forced. A copy of the grammar's state would cost more with each token of the answer.
            return len(token_ids) if self._grammar is None else self._grammar.num_allowed(token_ids)
        ahead = self.copy()
        for at, token in enumerate(token_ids):
            if not ahead._allows(token):
                return at
            ahead.advance(token)
        return len(token_ids)

    def copy(self) -> "BudgetState":
        copied = copy(self)
        copied._grammar = None if self._grammar is None else self._grammar.copy()
        return copied

    def allowed(self) -> npt.NDArray[np.int32] | None:
        if not (closing := self._closing()):
            return None if self._grammar is None else self._grammar.allowed()
        words = np.zeros(closing[0] // 32 + 1, np.uint32)
        words[-1] = 1 << closing[0] % 32
        return words.view(np.int32)

    def _allows(self, token_id: int) -> bool:
        if closing := self._closing():
            return token_id == closing[0]
        return self._grammar is None or self._grammar.num_allowed([token_id]) > 0

    def _closing(self) -> list[int]:
        """Return the tokens that close the reasoning, without those that the answer ends with; [] before the budget is
        used up and behind the reasoning."""
        if not self._is_within or self._num_left > 0:
            return []
        ids, last = self._budget.end_ids, self._last
        return next(ids[n:] for n in range(len(ids) - 1, -1, -1) if last[len(last) - n :] == ids[:n])

    def _read(self, token_id: int) -> None:
        """Find the markers in the text with one more token."""
        self._num_left -= self._is_within
        self._last = [*self._last, token_id][-len(self._budget.end_ids) :]
        self._held += self._budget.spelled(token_id)
        if self._may_begin:
            # A character that is not whole is left out.
            text, num_read = codecs.utf_8_decode(self._held, "replace", False)
            begun = text.lstrip()
            self._held = begun.removeprefix(self._begin).encode() + self._held[num_read:]
            if not begun.startswith(self._begin):
                self._may_begin = self._begin.startswith(begun)
                return
            self._may_begin, self._is_within = False, True
        if self._end in self._held:
            self._is_within = False
        self._held = self._held[1 - len(self._end) :]
