"""Keys and values of preempted requests in host memory: who has how much there, and when that is worth it."""

from collections.abc import Iterator

from lorasrv.costs import CostModel
from lorasrv.request import RequestId


class SwapSpace:
    """Pages of host memory, bounded. Mutated by the engine thread only.

    Args:
        mode: `swap` whenever there is room, `recompute` never, `auto` whichever costs less.
        capacity_bytes: most host memory.
        block_bytes: of one page in all layers.
    """

    def __init__(self, mode: str, capacity_bytes: int, block_bytes: int, costs: CostModel) -> None:
        self._mode = mode
        self._num_free = capacity_bytes // block_bytes
        self._block_bytes = block_bytes
        self._costs = costs
        self._pages: dict[RequestId, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(self._pages.values()) * self._block_bytes

    def is_worth_it(self, num_pages: int, num_tokens: int) -> bool:
        """Whether to keep this many pages, which hold so many computed tokens, instead of computing them again."""
        if not 0 < num_pages <= self._num_free or self._mode == "recompute":
            return False
        cost = self._costs.swap_s(num_pages * self._block_bytes)
        return self._mode == "swap" or cost < self._costs.recompute_s(num_tokens)

    def take(self, request_id: RequestId, num_pages: int) -> None:
        assert request_id not in self._pages, f"request {request_id} is swapped out already"
        self._pages[request_id] = num_pages
        self._num_free -= num_pages

    def give_back(self, request_id: RequestId) -> None:
        self._num_free += self._pages.pop(request_id)

    def holders(self) -> Iterator[tuple[RequestId, int]]:
        """Who has how many pages."""
        yield from self._pages.items()
