"""Define to which keys and values of its own text a request's tokens attend (*see*). Torch-free; docs/kv-policy.md
explains it.

Without a policy every token sees all tokens before it. A policy drops whole pages of the request's table, in every
layer; tokens keep their positions. Which keys a token sees depends only on the request, not on how its tokens are split
into steps, and not on other requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from lorasrv.errors import InvalidRequest

HOLE = -1
"""Entry of a page table in place of a dropped page."""
MIN_RECENT_PAGES = 4
DEFAULT_SINK, DEFAULT_RECENT, DEFAULT_EVERY = 16, 128, 256
OBSERVED_ROWS = 32
"""Number of last rows before a selection whose attention decides it."""
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPolicy(ABC):
    """Determine which pages the tokens of a request see; sizes are in tokens.

    Raises:
        InvalidRequest: a size is out of range; the message names the field.
    """

    kind: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]
    """Names of the fields that a client sets."""
    # First tokens, which all others see; and the number of tokens before itself that each token sees.
    sink: int = DEFAULT_SINK
    recent: int = DEFAULT_RECENT
    # Tokens of a page, and of the largest step; filled in at admission.
    page_size: int = 1
    step_tokens: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not 1 <= size <= MAX_TOKENS:
                raise self._wrong(field.name, f"must be between 1 and {MAX_TOKENS} tokens, not {size}")

    def placed(self, page_size: int, step_tokens: int) -> Self:
        """Return the policy with sizes rounded up to whole pages, within the largest possible size.

        Raises:
            InvalidRequest: it keeps too little.
        """
        least = MIN_RECENT_PAGES * page_size
        if self.recent < least:
            raise self._wrong(
                "recent", f"must be at least {least} tokens ({MIN_RECENT_PAGES} pages), not {self.recent}"
            )
        pages = {name: min(-(-getattr(self, name) // page_size), MAX_TOKENS // page_size) for name in self.sizes}
        sizes = {name: count * page_size for name, count in pages.items()}
        return replace(self, page_size=page_size, step_tokens=step_tokens, **sizes)

    def as_dict(self) -> Mapping[str, int]:
        """Return the sizes by name."""
        return {name: getattr(self, name) for name in self.sizes}

    @property
    @abstractmethod
    def may_draft(self) -> bool:
        """Return whether several tokens may be verified in a step."""

    @property
    @abstractmethod
    def num_full_rows(self) -> int:
        """Return how many first tokens see all tokens before them, unless pages are selected."""

    @abstractmethod
    def hole(self, position: int) -> range:
        """Return the table places of the pages that no token from `position` on sees, whatever was selected."""

    @abstractmethod
    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split positions `start .. end - 1` of a step into ranges whose positions all see the same pages."""

    @abstractmethod
    def most_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return for how many tokens a request of `num_tokens` tokens holds pages at a time, at most."""

    @abstractmethod
    def salt(self, place: int) -> bytes:
        """Return the salt of the page at `place` of a table; empty if its tokens see all tokens before them."""

    def next_check(self, num_prompt_tokens: int, num_computed: int) -> int:
        """Return after how many computed tokens pages are selected next; no step computes beyond that before."""
        return MAX_TOKENS

    def num_reusable(self, num_prompt_tokens: int) -> int:
        """Return how many first tokens need not be computed if their pages are found."""
        return MAX_TOKENS

    def num_observed(self, num_prompt_tokens: int, start: int, end: int, num_holes: int) -> int:
        """Return how many of the last positions in `start .. end - 1` must be observed for a selection."""
        return 0

    def select(self, masses: Sequence[float], num_computed: int, holes: Collection[int]) -> list[int]:
        """Return the places of the pages to drop when `num_computed` tokens are computed.

        Args:
            masses: attention paid to the page of each place.
            holes: places without a page.
        """
        return []

    def _wrong(self, name: str, rule: str) -> InvalidRequest:
        return InvalidRequest(f"kv_policy.{name} {rule}", param=f"kv_policy.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy(KvPolicy):
    """Let a token see the first `sink` tokens, its own page and those of the `recent` tokens before (StreamingLLM, Xiao
    et al. 2023, with rotary positions as they are)."""

    kind: ClassVar[str] = "window"
    sizes: ClassVar[tuple[str, ...]] = ("sink", "recent")

    @property
    def may_draft(self) -> bool:
        return True

    @property
    def num_full_rows(self) -> int:
        return self.sink + self.recent + self.page_size

    def hole(self, position: int) -> range:
        first = self.sink // self.page_size
        return range(first, max(first, (position - self.recent) // self.page_size))

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            following = max(self.num_full_rows, start // self.page_size * self.page_size + self.page_size)
            yield start, min(end, following)
            start = following

    def most_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        # The tokens that are seen, those of the next step, and those of a step in flight.
        return min(num_tokens, self.sink + self.recent + 2 * self.step_tokens + 2 * self.page_size)

    def salt(self, place: int) -> bytes:
        is_full = (place + 1) * self.page_size <= self.num_full_rows
        return b"" if is_full else f"{self.kind} {self.sink} {self.recent}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectPolicy(KvPolicy):
    """Keep `budget` tokens: the first `sink`, the `recent` ones, and the pages that got the most attention of the last
    rows of the prompt (SnapKV, Li et al. 2024) and of those before every further selection, all added up (H2O, Zhang et
    al. 2023). Pages are selected at the prompt's end, and again every `every` tokens."""

    kind: ClassVar[str] = "select"
    sizes: ClassVar[tuple[str, ...]] = ("budget", "sink", "recent", "every")
    budget: int
    every: int = DEFAULT_EVERY

    def placed(self, page_size: int, step_tokens: int) -> Self:
        placed = super(SelectPolicy, self).placed(page_size, step_tokens)
        least = placed.sink + placed.recent + 2 * page_size
        if placed.budget < least:
            raise self._wrong(
                "budget", f"must be at least {least} tokens: sink, recent and two pages, not {self.budget}"
            )
        if self.every < OBSERVED_ROWS:
            raise self._wrong("every", f"must be at least {OBSERVED_ROWS} tokens, not {self.every}")
        return placed

    @property
    def may_draft(self) -> bool:
        return False

    @property
    def num_full_rows(self) -> int:
        return MAX_TOKENS

    def hole(self, position: int) -> range:
        return range(0)

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        yield start, end

    def most_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        return min(num_tokens, max(num_prompt_tokens, self.budget + self.every) + self.page_size)

    def salt(self, place: int) -> bytes:
        return b""

    def next_check(self, num_prompt_tokens: int, num_computed: int) -> int:
        if num_computed < num_prompt_tokens:
            return num_prompt_tokens
        return num_computed + self.every - (num_computed - num_prompt_tokens) % self.every

    def num_reusable(self, num_prompt_tokens: int) -> int:
        check = num_prompt_tokens + max(0, -(-(self.budget + 1 - num_prompt_tokens) // self.every)) * self.every
        return max(0, check - OBSERVED_ROWS)

    def num_observed(self, num_prompt_tokens: int, start: int, end: int, num_holes: int) -> int:
        check = self.next_check(num_prompt_tokens, start)
        if self._num_surplus(check, num_holes) <= 0:
            return 0
        return max(0, end - max(start, check - OBSERVED_ROWS))

    def select(self, masses: Sequence[float], num_computed: int, holes: Collection[int]) -> list[int]:
        surplus = self._num_surplus(num_computed, len(holes))
        if surplus <= 0:
            return []
        middle = range(self.sink // self.page_size, max(0, num_computed - self.recent) // self.page_size)
        kept = [place for place in middle if place not in holes]
        return sorted(kept, key=lambda place: (masses[place], place))[:surplus]

    def _num_surplus(self, num_computed: int, num_holes: int) -> int:
        """Return by how many pages `num_computed` tokens exceed the budget."""
        return -(-num_computed // self.page_size) - num_holes - self.budget // self.page_size
