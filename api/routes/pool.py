"""GET /v1/pool: whose the pages of the pool are."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from adapter_store.records import AdapterRecord
from adapter_store.spec import AdapterId, AdapterKey
from api.services import ServicesDep
from lorasrv.pool_map import AdapterPages, PoolMap, RequestPages

router = APIRouter()

Names = Mapping[AdapterKey, list[AdapterId]]


@router.get("/v1/pool")
async def show_pool(services: ServicesDep) -> dict[str, Any]:
    """The memory map of one moment. pages_free + pages_kv + pages_prefix + pages_adapters = pages_total."""
    pool = await services.engine.pool_map()
    # In a thread: the store may know thousands of adapters.
    return await run_in_threadpool(lambda: _as_json(pool, _names(services.store.list_adapters())))


def _names(records: Iterable[AdapterRecord]) -> Names:
    """The ids of each content: every one that has a version of it."""
    names = defaultdict(list)
    for record in records:
        for version in record.versions:
            names[version.key].append(record.adapter_id)
    return names


def _as_json(pool: PoolMap, names: Names) -> dict[str, Any]:
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
        "requests": [_request_as_json(request, names) for request in pool.requests],
        "adapters": [_adapter_as_json(adapter, names) for adapter in pool.adapters],
        "promised": [
            {"digest": f"sha256:{p.key}", "ids": names.get(p.key, []), "pinned": p.pinned, "state": p.state}
            for p in pool.promised
        ],
    }


def _request_as_json(request: RequestPages, names: Names) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "digest": request.adapter and f"sha256:{request.adapter}",
        "ids": names.get(request.adapter, []) if request.adapter else [],
        "pages": request.pages,
        "shared": request.shared,
    }


def _adapter_as_json(adapter: AdapterPages, names: Names) -> dict[str, Any]:
    return {
        "digest": f"sha256:{adapter.key}",
        "ids": names.get(adapter.key, []),
        "state": adapter.state,
        "pages": adapter.pages,
        "runs": adapter.runs,
        "bytes_used": adapter.bytes_used,
        "bytes_held": adapter.bytes_held,
        "requests": adapter.requests,
        "pinned": adapter.pinned,
    }
