"""Serve GET /v1/models: the base first, then the adapters."""

from functools import partial
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterNotFound
from api.asgi.query import Limit
from api.serving.model_list import adapter_card, base_card, digest_text
from api.serving.model_resolver import model_not_found
from api.serving.services import ServicesDep, ViewDep

router = APIRouter()


@router.get("/v1/models")
async def list_models(view: ViewDep, search: str = "", limit: Limit = None, after: str | None = None) -> Response:
    """List models: those whose id contains `search`, at most `limit`, after the id `after`."""
    content = await run_in_threadpool(view.models, search, limit, after)
    return Response(content, media_type="application/json")


@router.get("/v1/models/{name:path}")
async def show_model(name: str, services: ServicesDep, view: ViewDep) -> dict[str, Any]:
    """Return a model by any reference that a request may use, with the versions that answer and their shares.

    The base's name may contain slashes, as hub names do. A client's `%2F` arrives here as a slash.
    """
    if not name:
        raise HTTPException(404)
    base = base_card(
        services.base_name,
        services.started_s,
        services.engine.max_model_len,
        services.engine.weights.to_dict(),
        batch_invariant=services.engine.is_batch_invariant,
    )
    if name == services.base_name:
        return base
    try:
        record, shares = await services.looking_up(partial(view.targets, name))
    except AdapterNotFound as error:
        raise model_not_found(error, "model") from None
    targets = [
        {"version": version, "digest": digest_text(record.ref(version).key), "share": share}
        for version, share in shares.items()
    ]
    # If the alias is split between two versions, the version is chosen per request.
    root = targets[0]["digest"] if len(targets) == 1 else None
    return {**adapter_card(base, record), "id": name, "root": root, "targets": targets}
