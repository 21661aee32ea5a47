"""Pool fit: whether a request could ever get the context and the pages that it needs, beside its adapter."""

from collections.abc import Sequence

from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.kv_policy import KvPolicy
from lorasrv.memory.memory_manager import MemoryManager
from sgmv_kernels.formats.adapter_panels import AdapterLayout


class PoolFit:
    """Compare requests with an empty pool. What it reads never changes.

    Args:
        memory: accounts of the pool.
        max_model_len: tokens of prompt and answer together.
    """

    def __init__(self, memory: MemoryManager, max_model_len: int) -> None:
        self._memory = memory
        self._max_model_len = max_model_len

    def check_adapter(self, layouts: Sequence[AdapterLayout]) -> None:
        """Check that the pool has room for an adapter, or for all terms of a sum.

        Raises:
            InvalidRequest: the pool is too small.
        """
        pages, room = sum(map(self._memory.adapters.pages_for, layouts)), self._memory.adapter_pool.num_pages
        if pages > room:
            raise InvalidRequest(
                f"the adapter takes {pages} pages, but the pool has {room} for adapters; "
                "start the server with a larger --pool-bytes",
                param="adapter_id",
            )

    def max_new_tokens(
        self, num_prompt_tokens: int, layouts: Sequence[AdapterLayout], width: int, policy: KvPolicy | None
    ) -> int:
        """Return the rest of the context, or of the pool if that is smaller; at least one.

        Args:
            layouts: the layouts that the request's adapter has in the pool.
            width: number of sequences that the request computes together.
        """
        room = self._memory.max_kv_pages(layouts) // width * self._memory.kv.page_size
        if policy is not None and policy.most_tokens(num_prompt_tokens, self._max_model_len) <= room:
            room = self._max_model_len
        return max(1, min(self._max_model_len, room) - num_prompt_tokens)

    def check(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        layouts: Sequence[AdapterLayout],
        width: int,
        policy: KvPolicy | None,
    ) -> None:
        """Check that a request fits; the arguments are those of `max_new_tokens`.

        Raises:
            ContextLengthExceeded: the context or the pool is too small for it.
        """
        total = num_prompt_tokens + max_tokens
        if total > self._max_model_len:
            is_prompt = num_prompt_tokens >= self._max_model_len
            param, hint = ("prompt", "; shorten {param}") if is_prompt else ("max_tokens", " ({param})")
            raise ContextLengthExceeded(
                f"the context holds {self._max_model_len} tokens, but the request asks for {total}: "
                f"{num_prompt_tokens} of the prompt and {max_tokens} to generate{hint}",
                param=param,
            )
        total = total if policy is None else policy.most_tokens(num_prompt_tokens, total)
        kv_pages, most = width * self._memory.kv.pages_for(total), self._memory.max_kv_pages(layouts)
        if kv_pages > most:
            of_adapter = self._memory.kv_pool.num_pages - most
            raise ContextLengthExceeded(
                f"the pool has {self._memory.kv_pool.num_pages} pages, but the request needs {kv_pages + of_adapter}: "
                f"{kv_pages} for {width * total} tokens and {of_adapter} for the adapter; lower {{param}} "
                "or start the server with a larger --pool-bytes",
                param="max_tokens",
            )
