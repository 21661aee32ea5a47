"""Define which keys and values of a request's own text its tokens see. Torch-free; docs/kv-policy.md explains it.

Without a policy every token sees all before it. What a policy drops is whole pages of the request's table, in every
layer; tokens keep their positions. Which keys a token sees depends on the request alone: not on how its tokens are cut
into steps, nor on others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lorasrv.errors import InvalidRequest

HOLE = -1
"""Stands in a page table for a page that was dropped."""
WINDOW = "window"
MIN_RECENT_PAGES = 4
DEFAULT_SINK = 16
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """Let a token see the first `sink` tokens, and its own page and those of the `recent` tokens before (StreamingLLM,
    Xiao et al. 2023, with rotary positions as they are).

    Raises:
        InvalidRequest: a size is out of range; names the field.
    """

    recent: int
    sink: int = DEFAULT_SINK
    kind: str = WINDOW
    # Tokens of a page, and of the largest step; filled in at admission.
    page_size: int = 1
    step_tokens: int = 1

    def __post_init__(self) -> None:
        for name, size in (("sink", self.sink), ("recent", self.recent)):
            if not 1 <= size <= MAX_TOKENS:
                raise InvalidRequest(
                    f"kv_policy.{name} must be between 1 and {MAX_TOKENS} tokens, not {size}", param=f"kv_policy.{name}"
                )

    def placed(self, page_size: int, step_tokens: int) -> "KvPolicy":
        """Return the policy with sizes of whole pages, the next larger ones.

        Raises:
            InvalidRequest: the window is too small.
        """
        least = MIN_RECENT_PAGES * page_size
        if self.recent < least:
            raise InvalidRequest(
                f"kv_policy.recent must be at least {least} tokens ({MIN_RECENT_PAGES} pages), not {self.recent}",
                param="kv_policy.recent",
            )
        sink, recent = (-(-size // page_size) * page_size for size in (self.sink, self.recent))
        return replace(self, sink=sink, recent=recent, page_size=page_size, step_tokens=step_tokens)

    @property
    def num_full_rows(self) -> int:
        """Return how many first tokens see all before them."""
        return self.sink + self.recent + self.page_size

    def hole(self, position: int) -> range:
        """Return the places in the table of the pages that no token from `position` on sees."""
        first = self.sink // self.page_size
        return range(first, max(first, (position - self.recent) // self.page_size))

    def num_seen(self, position: int) -> int:
        """Return how many tokens the one at `position` sees, itself included."""
        return position + 1 - len(self.hole(position)) * self.page_size

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges into which positions `start .. end - 1` fall, so that all of one see the same pages."""
        while start < end:
            following = max(self.num_full_rows, start // self.page_size * self.page_size + self.page_size)
            yield start, min(end, following)
            start = following

    def num_exact(self, num_prompt_tokens: int, num_generated_tokens: int) -> int:
        """Return how many first tokens of an answer come of tokens that all see everything."""
        return min(num_generated_tokens, max(0, self.num_full_rows - num_prompt_tokens + 1))

    def most_tokens(self, num_tokens: int) -> int:
        """Return the tokens for which a request of `num_tokens` tokens holds pages at a time, at most: those that are
        seen, and those of the step to come and of one in flight."""
        return min(num_tokens, self.sink + self.recent + 2 * self.step_tokens + 2 * self.page_size)

    def salt(self, place: int) -> bytes:
        """Return what tells the page at `place` of a table from one whose tokens see everything; nothing if its own
        do."""
        is_full = (place + 1) * self.page_size <= self.num_full_rows
        return b"" if is_full else f"{self.kind} {self.sink} {self.recent}".encode()
