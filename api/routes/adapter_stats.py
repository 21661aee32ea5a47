"""Serve GET /v1/adapters/{id}/stats: usage and cost of an adapter since its upload."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter

from adapter_store.registry.references import BASE_ID
from adapter_store.spec import AdapterId, AdapterKey
from api.errors import ApiError
from api.serving.model_list import digest_text
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.store_view import ScopedStore
from lorasrv.metrics.usage import Usage, total
from lorasrv.metrics.usage_ledger import BASE_KEY

router = APIRouter()
_LOG = logging.getLogger(__name__)


@router.get("/v1/adapters/{adapter_id}/stats")
async def show_stats(adapter_id: str, services: ServicesDep, view: ViewDep) -> dict[str, Any]:
    """Return the usage and cost of an id since its upload, in total and by version. Restarts do not reset them.

    `base`, or the base's name, returns those of the base. Only administrators who may see every adapter can read
    them, because they cover all traffic.
    """
    if _is_base(adapter_id, services, view):
        usage = (await _read(services, "", [BASE_KEY]))[BASE_KEY]
        return {"object": "adapter.stats", "id": services.base_name, **usage.to_dict(), "versions": []}
    record = await services.looking_up(partial(view.get, adapter_id))
    # Versions with the same weights share their usage.
    usages = await _read(services, adapter_id, [version.key or BASE_KEY for version in record.versions])
    versions = [
        {"version": v.version, "digest": digest_text(v.key), **usages[v.key or BASE_KEY].to_dict()}
        for v in record.versions
    ]
    return {"object": "adapter.stats", "id": adapter_id, **total(usages.values()).to_dict(), "versions": versions}


def _is_base(name: str, services: Services, view: ScopedStore) -> bool:
    return name in (BASE_ID, services.base_name) and view.is_unrestricted and AdapterId(name) not in view.records()


async def _read(services: Services, adapter_id: str, keys: list[AdapterKey]) -> dict[AdapterKey, Usage]:
    with unusable_ledger():
        return await services.ledger.stats(adapter_id, keys)


@contextmanager
def unusable_ledger() -> Iterator[None]:
    """Refuse with 503 if the ledger's disk fails in the block."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        _LOG.error("the ledger cannot be read or written: %s", error)
        why = "the ledger cannot be read or written; the server's log says why"
        raise ApiError(503, why, code="ledger_unusable", headers={"retry-after": "10"}) from None
