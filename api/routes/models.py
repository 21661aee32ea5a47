"""GET /v1/models: the base first, then every adapter."""

from itertools import chain
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterNotFound
from adapter_store.records import AdapterRecord
from adapter_store.spec import AdapterRef
from api.naming import model_not_found
from api.paging import Limit, listing, page
from api.services import Services, ServicesDep

router = APIRouter()


@router.get("/v1/models")
async def list_models(
    services: ServicesDep, search: str = "", limit: Limit = None, after: str | None = None
) -> Response:
    """All models, or those whose id contains `search`, at most `limit` of them, beginning behind the id `after`."""
    return await run_in_threadpool(_list_models, services, search, limit, after)


def _list_models(services: Services, search: str, limit: int | None, after: str | None) -> Response:
    base = base_model(services)
    first = [base] if after is None and search.lower() in base["id"].lower() else []
    rest = None if limit is None else limit - len(first)
    behind = None if after == services.base_name else after
    records, more = page(services.store.list_adapters(), search, rest, behind)
    cards = (_card(base, record) for record in records)
    return listing(chain(first, cards), more)


@router.get("/v1/models/{name}")
async def show_model(name: str, services: ServicesDep) -> dict[str, Any]:
    """One model, by any reference that a request may use."""
    if name == services.base_name:
        return base_model(services)
    try:
        ref = await run_in_threadpool(services.store.resolve, name)
        record = await run_in_threadpool(services.store.get, ref.adapter_id)
    except AdapterNotFound as error:
        raise model_not_found(error, "model") from None
    return {**_card(base_model(services), record), "id": name, "root": _digest(ref)}


def base_model(services: Services) -> dict[str, Any]:
    """The base as a model card."""
    return {
        "id": services.base_name,
        "object": "model",
        "created": services.started_s,
        "owned_by": "lorasrv",
        "root": services.base_name,
        "parent": None,
        "max_model_len": services.engine.max_model_len,
    }


def _card(base: dict[str, Any], record: AdapterRecord) -> dict[str, Any]:
    return {
        **base,
        "id": record.adapter_id,
        "created": int(record.created_s),
        "root": _digest(record),
        "parent": base["id"],
    }


def _digest(named: AdapterRecord | AdapterRef) -> str:
    return f"sha256:{named.key}"
