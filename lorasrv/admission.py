"""What may enter the engine: a request that could never run is refused at the edge, with the numbers.

Any thread may ask: what is read here does not change while serving, but for the tier in which an adapter was found,
which is a moment old when it is used.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypedDict

from adapter_store.spec import AdapterKey
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.pool_books import PoolBooks
from lorasrv.request import AdapterTier, AddRequest, OnCold, RequestId, SamplingParams
from sgmv_kernels.layout import AdapterLayout

MAX_PINNED_SHARE = 0.5
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt and sampling; `adapter` None is the base."""

    adapter: AdapterKey | None
    principal: str
    on_cold: OnCold
    cache_salt: str
    adapter_id: str
    priority: int
    timeout_s: float | None


class AdapterFacts(Protocol):
    """What is to be known of adapters before their requests enter; `AdapterSource` knows it."""

    @property
    def max_host_bytes(self) -> int: ...

    def hold(self, key: AdapterKey, /) -> object: ...

    def layout(self, key: AdapterKey, /) -> AdapterLayout: ...

    def is_on_host(self, key: AdapterKey) -> bool: ...


def further_choices(first: AddRequest, request_ids: Sequence[RequestId]) -> list[AddRequest]:
    """More answers to the same prompt, each from the next seed, on the first one's pages."""
    seed = first.sampling.seed
    return [
        replace(
            first,
            request_id=request_id,
            sampling=first.sampling if seed is None else replace(first.sampling, seed=(seed + number) % 2**64),
            fork_of=first.request_id,
        )
        for number, request_id in enumerate(request_ids, 1)
    ]


class Admission:
    """The gate of one engine."""

    def __init__(self, books: PoolBooks, source: AdapterFacts | None, max_model_len: int, vocab_size: int) -> None:
        self._books = books
        self._source = source
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def admit(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: AdapterKey | None = None,
        *,
        principal: str = "anonymous",
        on_cold: OnCold = OnCold.WAIT,
        cache_salt: str = "",
        adapter_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AddRequest:
        """The message for `Engine.add_request`, or a refusal.

        `max_tokens` None takes the rest of the context or of the pool; a random request gets a seed. What the request
        was accepted with stays in the store until it has ended.
        Raises:
            InvalidRequest: the prompt is empty or names a token that does not exist, the adapter fits nowhere, or
                priority or timeout are out of range.
            ContextLengthExceeded: it can never fit.
            AdapterError: the adapter is not in the store any more, or damaged.
        """
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequest(f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
        if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}", param="timeout_s")
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= t < self._vocab_size for t in token_ids):
            raise InvalidRequest(f"token ids must lie in [0, {self._vocab_size})", param="prompt")
        hold = self._source.hold(adapter) if self._source is not None and adapter is not None else None
        layout = self.layout(adapter) if adapter is not None else None
        max_tokens = sampling.max_tokens or self._max_new_tokens(len(token_ids), layout)
        self._check_fits(len(token_ids), max_tokens, layout)
        if sampling.seed is None and not sampling.is_greedy:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            adapter_key=adapter,
            layout=layout,
            found=self._tier(adapter) if adapter is not None else None,
            principal=principal,
            on_cold=on_cold,
            cache_salt=cache_salt,
            adapter_id=adapter_id or (adapter or ""),
            priority=priority,
            timeout_s=timeout_s,
            hold=hold,
        )

    def _tier(self, adapter: AdapterKey) -> AdapterTier:
        """Where an adapter was a moment ago."""
        if self._books.adapters.is_ready(adapter):
            return AdapterTier.RESIDENT
        on_host = self._source is not None and self._source.is_on_host(adapter)
        return AdapterTier.HOST if on_host else AdapterTier.DISK

    def layout(self, adapter: AdapterKey) -> AdapterLayout:
        """How an adapter lies in the pool, if it fits the server at all. May read a file's header.

        Raises:
            InvalidRequest: there is no store, or host memory or pool are too small for it.
        """
        if self._source is None:
            raise InvalidRequest("this engine has no store of adapters", param="adapter_id")
        layout = self._source.layout(adapter)
        if layout.nbytes > self._source.max_host_bytes:
            raise InvalidRequest(
                f"the adapter takes {layout.nbytes} bytes, but host memory for adapters is "
                f"{self._source.max_host_bytes}; start the server with a larger --host-cache-bytes",
                param="adapter_id",
            )
        pages, room = self._books.adapters.pages_for(layout), self._books.adapter_pool.num_pages
        if pages > room:
            raise InvalidRequest(
                f"the adapter takes {pages} pages, but the pool has {room} for adapters; "
                "start the server with a larger --pool-bytes",
                param="adapter_id",
            )
        return layout

    def check_pin(self, layout: AdapterLayout) -> InvalidRequest | None:
        """Why one more adapter cannot be pinned, if so. For the engine's thread."""
        held, pages = self._books.tiers.held_pages(), self._books.adapters.pages_for(layout)
        most = int(MAX_PINNED_SHARE * self._books.adapter_pool.num_pages)
        if held + pages <= most:
            return None
        return InvalidRequest(
            f"pinned adapters may take {most} pages, half of the pool; {held} are pinned already and this one takes "
            f"{pages}; unpin another, or start the server with a larger --pool-bytes",
            param="pinned",
        )

    def _max_new_tokens(self, num_prompt_tokens: int, layout: AdapterLayout | None) -> int:
        """The rest of the context, or of the pool if that is smaller; at least one."""
        room = min(self._max_model_len, self._books.most_kv_pages(layout) * self._books.kv.page_size)
        return max(1, room - num_prompt_tokens)

    def _check_fits(self, num_prompt_tokens: int, max_tokens: int, layout: AdapterLayout | None) -> None:
        total = num_prompt_tokens + max_tokens
        if total > self._max_model_len:
            raise ContextLengthExceeded(
                f"the context holds {self._max_model_len} tokens, but the request asks for {total}: "
                f"{num_prompt_tokens} of the prompt and {max_tokens} to generate (max_tokens)",
                param="max_tokens" if num_prompt_tokens < self._max_model_len else "messages",
            )
        kv_pages, most = self._books.kv.pages_for(total), self._books.most_kv_pages(layout)
        if kv_pages > most:
            of_adapter = self._books.kv_pool.num_pages - most
            raise ContextLengthExceeded(
                f"the pool has {self._books.kv_pool.num_pages} pages, but the request needs {kv_pages + of_adapter}: "
                f"{kv_pages} for {total} tokens and {of_adapter} for the adapter; lower max_tokens "
                "or start the server with a larger --pool-bytes",
                param="max_tokens",
            )
