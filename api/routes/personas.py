"""Serve /v1/adapters/{id}/defaults, which reads defaults and creates versions with other ones, and :snapshot."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from adapter_store.spec import AdapterRef
from api.asgi.json_body import JsonRoute
from api.asgi.query import NO_POOL, OF_ONE_SERVER, IfMatch
from api.asgi.sse import run_until_disconnect
from api.auth.dependency import CallerDep
from api.errors import ApiError
from api.routes.adapters import registered
from api.serving.model_list import digest_text
from api.serving.persona_checks import check_defaults
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.snapshots import kept_snapshot
from api.serving.store_view import ScopedStore
from lorasrv.errors import InvalidRequest

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/adapters/{reference}/defaults")
async def show_defaults(reference: str, services: ServicesDep, view: ViewDep) -> dict[str, Any]:
    """Return the defaults of a version (null: none). Only its owner and administrators may read them."""
    ref = await services.looking_up(partial(view.resolve_one, reference))
    await _check_owner(ref, services, view, "read")
    defaults = (await services.personas.find(ref)).shown(may_read=True)["defaults"] if ref.persona else None
    return {
        "object": "adapter.defaults",
        "id": ref.adapter_id,
        "version": ref.version,
        "digest": digest_text(ref.key),
        "persona": digest_text(ref.persona or None),
        "defaults": defaults,
    }


@router.post("/v1/adapters/{reference}:snapshot", dependencies=OF_ONE_SERVER)
async def make_snapshot(
    reference: str, request: Request, services: ServicesDep, view: ViewDep, caller: CallerDep
) -> dict[str, Any]:
    """Store the keys and values of a version's fixed prompt on disk, computing them if needed.

    Returns the number of tokens and bytes. Does nothing if they are already stored.
    """
    services.engine.check_computes(NO_POOL)
    ref = await services.looking_up(partial(view.resolve_one, reference))
    await _check_owner(ref, services, view, "keep")
    name = f"{ref.adapter_id}@{ref.version}"
    if await services.personas.parts(ref):
        raise InvalidRequest(
            f"{name} is a sum of adapters, whose prompt is kept at its third request alone", param="id"
        )
    if ref.key is not None and (await run_in_threadpool(view.spec, ref.key)).invocation_tokens:
        why = "the base computes the beginning of its prompt, and a snapshot is of one adapter"
        raise InvalidRequest(f"{name} is an aLoRA: {why}; no snapshot of it is kept", param="id")
    found = await services.prefixes.of_version(ref) if ref.persona else None
    if found is None:
        tokens = services.engine.page_size_tokens
        why = f"the defaults of {name} begin with no prompt of at least {tokens} tokens that is the same for all users"
        raise InvalidRequest(f"{why}: nothing is there to be kept", param="id")
    made = await run_until_disconnect(request.receive, kept_snapshot(services, ref, found, caller))
    return {
        "object": "adapter.snapshot",
        "id": ref.adapter_id,
        "version": ref.version,
        "tokens": made.tokens,
        "bytes": made.nbytes,
    }


@router.put("/v1/adapters/{reference}/defaults")
async def put_defaults(
    reference: str, body: dict[str, Any], services: ServicesDep, view: ViewDep, if_match: IfMatch
) -> JSONResponse:
    """Create a version with these defaults and the weights (or `adapters`) of the named version, and make it current.

    The body {} creates a version without defaults. If the named version has defaults, only its owner and
    administrators may change them.

    Returns 201 for a new version, 200 if the id already has these weights with these defaults.
    """
    ref: AdapterRef = await run_in_threadpool(view.resolve_one, reference)
    await _check_owner(ref, services, view, "change")
    body = {name: value for name, value in body.items() if value is not None}
    if ref.key is None:
        stored = (await services.personas.find(ref)).shown(may_read=True)["defaults"]
        body = {name: stored[name] for name in ("adapters",) if name in stored} | body
    if not body and ref.key is None:
        raise InvalidRequest(f"{ref.adapter_id} has no weights, so it needs defaults; delete it instead")
    if ref.key is not None and body.get("adapters"):
        why = f"{ref.adapter_id}@{ref.version} has weights of its own; give the sum another id"
        raise InvalidRequest(why, param="adapters")
    own = await services.engine.own_tokenizer(ref.key)
    checked = await check_defaults(body, services, view, own) if body else None
    if checked is not None and ref.key is not None:
        checked.check_spec(await run_in_threadpool(view.spec, ref.key))
    text = checked.text if checked is not None else ""
    done = await run_in_threadpool(partial(view.register_defaults, ref.adapter_id, text, ref, if_match=if_match))
    return registered(done, checked, {})


async def _check_owner(ref: AdapterRef, services: Services, view: ScopedStore, verb: str) -> None:
    """Check that the caller may read and change the defaults of a version, if it has any.

    Raises:
        ApiError: 403, the defaults belong to another key.
    """
    if ref.persona and not view.may_read_defaults((await services.personas.find(ref)).owner):
        message = f"only its owner and administrators {verb} the defaults of {ref.adapter_id}@{ref.version}"
        raise ApiError(403, message, code="forbidden")
