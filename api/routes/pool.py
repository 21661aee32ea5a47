"""Serve GET /v1/pool, the memory map of the pool."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from adapter_store.registry.records import AdapterRecord
from adapter_store.spec import AdapterId, AdapterKey
from api.asgi.query import OF_ONE_SERVER
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.store_view import ScopedStore
from lorasrv.engine.pool_map import AdapterPages, PoolMap, RequestPages, runs_of
from lorasrv.metrics.request_stats import MAX_ACCOUNTS
from lorasrv.worker.host_memory import resident_bytes

router = APIRouter()
MOST_HOT = 20
Names = Mapping[AdapterKey, list[tuple[AdapterId, int]]]


@router.get("/v1/pool", dependencies=OF_ONE_SERVER)
async def show_pool(services: ServicesDep, view: ViewDep) -> dict[str, Any]:
    """Return the pool's memory map: pages_free + pages_kv + pages_prefix + pages_adapters = pages_total.

    Includes the adapters with the most traffic, and the use of host memory. Keys without scope `admin` see the page
    counts, their own requests and the adapters that they may see.
    """
    pool = await services.engine.pool_map()
    traffic = await _traffic(services, view)
    # In a thread, because the store may have thousands of adapters.
    shown = await run_in_threadpool(lambda: _as_json(pool, _names(view.list_adapters()), view))
    memory = _memory(services, pool) if view.is_unrestricted else None
    return {**shown, "memory": memory, "traffic": traffic}


def _memory(services: Services, pool: PoolMap) -> dict[str, int | None]:
    """Return the resident memory of this process (None if the system does not report it) and its known parts.

    On CUDA, weights and pool are in the device's memory instead.
    """
    figures = services.engine.metrics.stats()
    return {
        "resident_bytes": resident_bytes(),
        "weight_bytes": figures.weight_bytes,
        "pool_used_bytes": (pool.pages_total - pool.pages_free) * pool.block_bytes,
        "host_cache_bytes": figures.host_cache_bytes,
        "swap_bytes": pool.swap_bytes,
    }


async def _traffic(services: Services, view: ScopedStore) -> dict[str, Any]:
    """Return total traffic, and in `hottest` the ids with the most tokens per second.

    The base has neither digest nor tier.
    """
    traffic = services.engine.request_stats
    asked = traffic.hottest(MAX_ACCOUNTS)
    totals = [traffic.total]
    if not view.is_unrestricted:
        records = view.records()
        asked = [(name, account) for name, account in asked if name in records]
        totals = [account for _, account in asked]
    # Copy the keys: another request may change an account's key while this one awaits the tiers.
    hottest = [(adapter_id, account, account.key) for adapter_id, account in asked[:MOST_HOT]]
    keys = {key for _, _, key in hottest if key is not None}
    tiers = dict(zip(keys, await asyncio.gather(*map(services.engine.tier, keys)), strict=True))
    return {
        "requests": sum(account.requests for account in totals),
        "tokens": sum(account.tokens for account in totals),
        "tokens_per_s": round(sum(map(traffic.rate, totals)), 2),
        "hottest": [
            {
                "id": adapter_id or services.base_name,
                "digest": key and f"sha256:{key}",
                "tier": key and tiers[key],
                "requests": account.requests,
                "tokens": account.tokens,
                "tokens_per_s": round(traffic.rate(account), 2),
            }
            for adapter_id, account, key in hottest
        ],
    }


def _names(records: Iterable[AdapterRecord]) -> Names:
    """Map each content to the versions that have it, as (id, version number)."""
    names = defaultdict(list)
    for record in records:
        for version in record.versions:
            if version.key is not None:
                names[version.key].append((record.adapter_id, version.version))
    return names


def _named(key: AdapterKey | None, names: Names) -> dict[str, Any]:
    versions = names.get(key, []) if key is not None else []
    return {
        "digest": key and f"sha256:{key}",
        "ids": list(dict.fromkeys(adapter_id for adapter_id, _ in versions)),
        "versions": [f"{adapter_id}@{version}" for adapter_id, version in versions],
    }


def _as_json(pool: PoolMap, names: Names, view: ScopedStore) -> dict[str, Any]:
    requests = [
        request for request in pool.requests if view.is_unrestricted or request.principal == view.caller.principal
    ]
    adapters = [adapter for adapter in pool.adapters if view.is_unrestricted or adapter.key in names]
    promised = [promise for promise in pool.promised if view.is_unrestricted or promise.key in names]
    return {
        "object": "pool",
        "pages_total": pool.pages_total,
        "pages_free": pool.pages_free,
        "pages_kv": pool.pages_kv,
        "pages_prefix": pool.pages_prefix,
        "pages_adapters": pool.pages_adapters,
        "page_tokens": pool.page_tokens,
        "block_bytes": pool.block_bytes,
        "free_runs": pool.free_runs,
        "longest_free_run": pool.longest_free_run,
        "moved_pages": pool.moved_pages,
        "swap_bytes": pool.swap_bytes,
        "prefix_runs": runs_of(pool.prefix_page_ids),
        "requests": [_request_as_json(request, names) for request in requests],
        "adapters": [_adapter_as_json(adapter, names) for adapter in adapters],
        "promised": [{**_named(p.key, names), "pinned": p.pinned, "state": p.state} for p in promised],
    }


def _request_as_json(request: RequestPages, names: Names) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        **_named(request.adapter, names),
        "pages": request.pages,
        "shared": request.shared,
        "runs": runs_of(request.page_ids),
    }


def _adapter_as_json(adapter: AdapterPages, names: Names) -> dict[str, Any]:
    return {
        **_named(adapter.key, names),
        "state": adapter.state,
        "pages": adapter.pages,
        "runs": adapter.runs,
        "bytes_used": adapter.bytes_used,
        "bytes_held": adapter.bytes_held,
        "requests": adapter.requests,
        "pinned": adapter.pinned,
    }
