"""GET /v1/models: the base first, then every adapter."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterNotFound
from adapter_store.records import AdapterRecord
from adapter_store.spec import AdapterRef
from api.naming import model_not_found
from api.services import Services, ServicesDep

router = APIRouter()

MAX_PAGE = 100_000


@router.get("/v1/models")
async def list_models(
    services: ServicesDep,
    search: str = "",
    limit: Annotated[int | None, Query(ge=1, le=MAX_PAGE)] = None,
    after: str | None = None,
) -> dict[str, Any]:
    """All models, or those whose id contains `search`, at most `limit` of them, beginning behind the id `after`."""
    records = await run_in_threadpool(services.store.list_adapters)
    models = [base_model(services), *(_adapter_model(services, record) for record in records)]
    found = [model for model in models if search.lower() in model["id"].lower()]
    if after is not None:
        ids = [model["id"] for model in found]
        found = found[ids.index(after) + 1 :] if after in ids else []
    return {"object": "list", "data": found[:limit], "has_more": limit is not None and len(found) > limit}


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
    return {**_adapter_model(services, record), "id": name, "root": _digest(ref)}


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


def _adapter_model(services: Services, record: AdapterRecord) -> dict[str, Any]:
    return {
        **base_model(services),
        "id": record.adapter_id,
        "created": int(record.created_s),
        "root": _digest(record),
        "parent": services.base_name,
    }


def _digest(named: AdapterRecord | AdapterRef) -> str:
    return f"sha256:{named.key}"
