"""Request -> page table. The one owner of which pages hold whose keys and values."""

from collections.abc import Iterator

from lorasrv.page_pool import PagePool
from lorasrv.request import RequestId


class KVCacheManager:
    """Page tables over a `PagePool`; a page holds `page_size` tokens of one request, in every layer."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self.page_size = page_size
        self._tables: dict[RequestId, list[int]] = {}

    @property
    def num_pages(self) -> int:
        """Pages in all tables together."""
        return sum(len(table) for table in self._tables.values())

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def missing_pages(self, request_id: RequestId, num_tokens: int) -> int:
        """Pages to be added before `num_tokens` tokens of the request fit."""
        return max(0, self.pages_for(num_tokens) - len(self._tables.get(request_id, ())))

    def allocate(self, request_id: RequestId, num_tokens: int) -> bool:
        """Grow the request's table to hold `num_tokens` tokens; False (and nothing changed) if the pool has too few."""
        pages = self._pool.allocate_low(self.missing_pages(request_id, num_tokens))
        if pages is None:
            return False
        self._tables.setdefault(request_id, []).extend(pages)
        return True

    def page_table(self, request_id: RequestId) -> tuple[int, ...]:
        return tuple(self._tables[request_id])

    def free(self, request_id: RequestId) -> None:
        """Give back the request's pages; nothing happens if it has none."""
        self._pool.release(self._tables.pop(request_id, ()))

    def references(self) -> Iterator[int]:
        """Every page id that a table holds, for `PagePool.check_integrity`."""
        for table in self._tables.values():
            yield from table
