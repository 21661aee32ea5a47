"""Serve /v1/adapters: upload, list, warm, pin, limit and delete adapters; move ids and aliases between versions."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterError, AdapterNotFound
from adapter_store.formats.peft_dir import MAX_TOKENIZER_BYTES
from adapter_store.registry.records import AdapterRecord, Change, Deletion, Registration, check_preconditions
from adapter_store.spec import AdapterKey, AdapterRef, AddedToken
from api.asgi.json_body import JsonRoute
from api.asgi.query import NO_POOL, OF_ONE_SERVER, IfMatch, Limit, etag_header, listing, page
from api.asgi.sse import run_until_disconnect
from api.asgi.uploads import announced_length, read_pieces
from api.auth.principal import Caller, Scope
from api.errors import ApiError
from api.schemas.adapters import AdapterBody, AdapterPatch, WarmBody
from api.serving.model_list import adapter_json, aliases_json, digest_text
from api.serving.model_resolver import ResolvedModel
from api.serving.persona_checks import CheckedDefaults, check_defaults
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.store_view import ScopedStore
from lorasrv.errors import EngineDead, InvalidRequest
from lorasrv.outputs import AdapterTier
from lorasrv.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)

MAX_WAIT_S = 60.0
Switch = Annotated[Literal["true", "1", "false", "0", ""] | None, "on or off"]


@router.put("/v1/blobs/sha256:{digest}")
async def put_blob(digest: str, request: Request, view: ViewDep) -> JSONResponse:
    """Store weights under their digest. Existing weights are written again, which repairs a damaged file.

    Returns 201, or 200 if the weights existed and the caller may read an id that uses them or has sent them before.
    """
    length = announced_length(request)
    upload, known = await run_in_threadpool(view.open_blob, digest, length)
    try:
        await read_pieces(request, upload.write)
        await run_in_threadpool(upload.commit)
    except BaseException:
        # The client may have disconnected: the abort must not block the event loop.
        asyncio.get_running_loop().run_in_executor(None, upload.abort)
        raise
    body = {"object": "blob", "digest": f"sha256:{digest}", "bytes": length, "created": not known}
    return JSONResponse(body, 200 if known else 201)


@router.post("/v1/adapters")
async def register(body: AdapterBody, services: ServicesDep, view: ViewDep, if_match: IfMatch) -> JSONResponse:
    """Validate uploaded weights and defaults, and register them under an id and optionally an alias.

    Returns 201 for a new version, 200 if the id already has this content with these defaults.
    """
    config, own = await _with_tokens(body, services, view)
    checked = await check_defaults(body.defaults, services, view, own) if body.defaults else None
    if body.config is not None and body.defaults and body.defaults.get("adapters"):
        raise InvalidRequest(
            "adapters are the weights of a sum; leave config and weights out", param="defaults.adapters"
        )
    defaults = checked.text if checked is not None else ""
    if body.config is None and defaults == "{}":
        raise InvalidRequest("defaults say nothing; a version without weights needs some", param="defaults")
    options: dict[str, Any] = {
        "if_not_exists": body.if_not_exists,
        "alias": body.alias,
        "if_match": if_match,
    }
    if config is None or body.weights is None:
        add = partial(view.register_defaults, body.id, defaults, **options)
    else:
        terms = {"allow_partial": body.allow_partial, "stored": body.stored, "allow_drift": body.allow_drift}
        options |= {} if checked is None else {"check_spec": checked.check_spec}
        add = partial(view.register, body.id, config, body.weights, defaults=defaults, **terms, **options)
    done = await run_in_threadpool(add)
    return registered(done, checked, {} if body.alias is None else {"alias": body.alias})


async def _with_tokens(
    body: AdapterBody, services: Services, view: ScopedStore
) -> tuple[dict[str, Any] | None, Tokenizer | None]:
    """Return the config and the base's tokenizer, both extended by the tokens that the uploaded tokenizer adds.

    The tokenizer is None if it adds no tokens, or the body has no defaults to check with it.
    """
    if body.config is None or body.tokenizer is None:
        if body.config is not None and body.config.get("added_tokens"):
            why = "added_tokens are read from tokenizer.json; upload it, and send its digest as tokenizer"
            raise InvalidRequest(why, param="config.added_tokens")
        return body.config, None
    base = services.engine.tokenizer
    read = partial(view.read_upload, body.tokenizer, MAX_TOKENIZER_BYTES)
    tokens = await services.uploaded_tokenizers.added_tokens(read, base, view.caller.principal)
    extended = None
    if tokens and body.defaults:
        extended = await run_in_threadpool(base.extended, [AddedToken(**token) for token in tokens])
    return body.config | {"added_tokens": tokens}, extended


def registered(done: Registration, checked: CheckedDefaults | None, more: Mapping[str, Any]) -> JSONResponse:
    """Build the response to a registration."""
    report = done.report
    content = {
        "object": "adapter",
        "id": done.ref.adapter_id,
        "version": done.ref.version,
        "digest": digest_text(done.ref.key),
        "created": done.created,
        "stored": report and report.stored,
        "report": report and report.to_dict(),
    }
    if checked is not None:
        content["persona"] = {"digest": f"sha256:{done.ref.persona}", **checked.report()}
    headers = ResolvedModel(done.ref.adapter_id, done.ref).headers
    return JSONResponse({**content, **more}, 201 if done.created else 200, headers)


@router.get("/v1/adapters")
async def list_adapters(
    services: ServicesDep, view: ViewDep, search: str = "", limit: Limit = None, after: str | None = None
) -> Response:
    """List ids with their versions and aliases: those containing `search`, at most `limit`, after the id `after`."""
    return await run_in_threadpool(_list_adapters, services, view, search, limit, after)


def _list_adapters(
    services: Services, view: ScopedStore, search: str, limit: int | None, after: str | None
) -> Response:
    records, more = page(view.list_adapters(), search, limit, after)
    corrupt = services.store.quarantined()
    return listing((adapter_json(record, corrupt) for record in records), more)


@router.get("/v1/adapters/{adapter_id}")
async def show_adapter(adapter_id: str, services: ServicesDep, view: ViewDep) -> JSONResponse:
    """Return an id with its versions and aliases, and details of the current version.

    These are its upload report (null: no weights), verdict (null: not verified) and persona (null: no defaults). Only
    the persona's owner and administrators see its defaults. For a sum, the persona has the number of deleted adapters.
    """
    record = await services.looking_up(partial(view.get, adapter_id))
    current = record.ref(record.current_version)
    history = services.store.version_history
    persona = None
    if current.persona:
        stored = await services.personas.find(current)
        persona = stored.shown(may_read=view.may_read_defaults(stored.owner))
        persona["snapshot"] = await _snapshot(services, current)
        persona["deleted_parts"] = await run_in_threadpool(services.personas.num_deleted_parts, stored)
    report = None if current.key is None else await run_in_threadpool(history.report, current)
    verified = await run_in_threadpool(history.verdict, current)
    shown = adapter_json(record, services.store.quarantined()) | await _used(services, record)
    shown |= {"report": report and report.to_dict(), "verified": verified, "persona": persona}
    return JSONResponse(shown, headers=etag_header(record))


async def _snapshot(services: Services, ref: AdapterRef) -> dict[str, int] | None:
    """Return the tokens and bytes of the snapshot of a version's prompt; None if there is none."""
    found = await services.prefixes.of_version(ref)
    try:
        made = found and await services.engine.find_snapshot(ref.key, found.prefix, found.token_ids)
    except EngineDead:
        made = None
    return {"tokens": made.tokens, "bytes": made.nbytes} if made else None


async def _used(services: Services, record: AdapterRecord) -> dict[str, Any]:
    """Return the tier of the current version and the traffic of the id.

    The tier is null if it is unknown because the engine is dead, or the version has no weights.
    """
    traffic = services.engine.request_stats
    account = traffic.of(record.adapter_id)
    try:
        tier = None if record.key is None else await services.engine.tier(record.key)
    except EngineDead:
        tier = None
    counts = {"requests": account.requests, "tokens": account.tokens}
    return {"tier": tier, "traffic": {**counts, "tokens_per_s": round(traffic.rate(account), 2)}}


@router.post("/v1/adapters/{reference}:warm", dependencies=OF_ONE_SERVER)
async def warm_adapter(
    reference: str, body: WarmBody, request: Request, services: ServicesDep, view: ViewDep
) -> dict[str, Any]:
    """Load an adapter into the pool before its requests arrive. Returns once it is resident, or at the deadline."""
    ref = await services.looking_up(partial(view.resolve_one, reference))
    target = ResolvedModel(reference, ref)
    if parts := await services.personas.parts(ref):
        target = target.summed(parts, view)
    key = None if target.ref is None else target.ref.key
    if key is None:
        raise InvalidRequest(f"{ref.adapter_id}@{ref.version} has no weights: the base answers", param="id")
    try:
        # Held until it is loaded; an adapter known to be damaged is refused here.
        hold = await run_in_threadpool(services.store.hold, key)
        work = services.engine.warm(hold.key, body.deadline_ms / 1000)
        reached = await run_until_disconnect(request.receive, work)
    except AdapterError as error:
        raise target.naming(error) from None
    return {
        "object": "adapter.warm",
        "id": ref.adapter_id,
        "digest": digest_text(key),
        "tier": reached.tier,
        "reached": reached.tier is AdapterTier.RESIDENT,
        "load_ms": round(reached.load_ms, 1),
    }


@router.patch("/v1/adapters/{reference}", dependencies=OF_ONE_SERVER)
async def change_adapter(
    reference: str, body: AdapterPatch, services: ServicesDep, view: ViewDep, if_match: IfMatch
) -> JSONResponse:
    """Change an adapter in one step: set the current version, move aliases, set limits (for all versions), or pin it.

    Pinning returns when the adapter is resident or after ten seconds; unpinning returns at once.

    A pin applies to the content that the reference names now, until it is unpinned or the server restarts. Versions
    uploaded later are not pinned; unpin an older one by its own name (`mia@1`). If the server uses keys, pins and
    limits need scope `admin`, because they take resources from other keys.
    """
    change = body.wanted()
    _check_may_share_out(body, view.caller)
    if body.pinned is not None:
        services.engine.check_computes(NO_POOL)
    ref = await services.looking_up(partial(view.resolve_one, reference))
    record = await run_in_threadpool(view.get, ref.adapter_id)
    check_preconditions(ref.adapter_id, record, if_match)
    if change is not None:
        _check_is_of_all(change, reference, record)
    if change is not None and change.version is not None:
        change.check_versions(record)
        ref = record.ref(change.version)
    changed: dict[str, Any] = {"object": "adapter", "id": ref.adapter_id, "digest": digest_text(ref.key)}
    undo_pin = None
    # Pin first: if the pin is refused, nothing must change. Unpinning is never refused, so it comes last.
    if body.pinned:
        key = _pinnable(ref)
        if change is not None and not await _is_pinned(services, key):
            undo_pin = partial(services.engine.unpin, key)
        changed |= {"pinned": True, "tier": await _set_pinned(services, key, reference, True)}
    if change is not None:
        # Shielded from the client's disconnection, after which the engine would keep the old limits.
        record = await asyncio.shield(_change(services, view, ref.adapter_id, change, if_match, undo_pin))
        changed |= _changed(change, record)
    if body.pinned is False:
        changed |= {"pinned": False, "tier": await _set_pinned(services, _pinnable(ref), reference, False)}
    return JSONResponse(changed, headers=etag_header(record))


def _pinnable(ref: AdapterRef) -> AdapterKey:
    if ref.key is None:
        raise InvalidRequest(f"{ref.adapter_id}@{ref.version} has no weights to be pinned", param="pinned")
    return ref.key


def _check_may_share_out(body: AdapterPatch, caller: Caller) -> None:
    # `limits: null` removes limits, so it counts as given. For the other fields, null means that they are left out.
    given = (("pinned", "pins", body.pinned is not None), ("limits", "limits", "limits" in body.model_fields_set))
    for name, what, is_set in given:
        if is_set and not caller.may(Scope.ADMIN):
            raise ApiError(403, f"{what} need a key of scope admin", code="forbidden", param=name)


def _check_is_of_all(change: Change, reference: str, record: AdapterRecord) -> None:
    if reference == record.adapter_id:
        return
    given = {"limits": change.limits is not None, "aliases": bool(change.aliases), "version": True}
    param = next(name for name, is_given in given.items() if is_given)
    what = {"limits": "limits are", "aliases": "aliases are", "version": "the current version is"}[param]
    raise InvalidRequest(f"{what} of all versions; name {record.adapter_id!r} without one", param=param)


def _changed(change: Change, record: AdapterRecord) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if change.limits is not None:
        shown["limits"] = dict(change.limits)
    if change.aliases:
        shown["aliases"] = aliases_json(record)
    if change.version is not None:
        shown["version"] = record.current_version
    return shown


async def _is_pinned(services: Services, key: AdapterKey) -> bool:
    promised = (await services.engine.pool_map()).promised
    return any(adapter.key == key and adapter.pinned for adapter in promised)


async def _set_pinned(services: Services, key: AdapterKey, reference: str, pinned: bool) -> AdapterTier:
    reached = await (services.engine.pin if pinned else services.engine.unpin)(key)
    if pinned and not await run_in_threadpool(services.store.is_named, key):
        # The adapter was deleted meanwhile; without a name nobody could unpin it.
        await services.engine.unpin(key)
        raise AdapterNotFound(reference)
    return reached.tier


async def _change(
    services: Services,
    view: ScopedStore,
    adapter_id: str,
    change: Change,
    if_match: Collection[str] | None,
    undo: Callable[[], Awaitable[object]] | None,
) -> AdapterRecord:
    """Apply the change; if it is refused, undo the pin that was set for it."""
    try:
        record: AdapterRecord = await run_in_threadpool(view.change, adapter_id, change, if_match=if_match)
    except Exception:
        if undo is not None:
            await undo()
        raise
    if change.limits is not None:
        await services.limits.apply(adapter_id)
    return record


@router.delete("/v1/adapters/{reference}")
async def delete_adapter(
    reference: str,
    request: Request,
    services: ServicesDep,
    view: ViewDep,
    if_match: IfMatch,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] | Literal["all"] = 0.0,
    force: Switch = None,
) -> JSONResponse:
    """Delete an id, or one version (`mia@3`). Returns 202 at once; running requests finish with their version.

    With `wait` (seconds), returns 200 once they have finished, or 202 after that time. With `wait=all`, returns 200
    once no server that follows this one accepts new requests for it; `followers` counts the servers that confirmed.

    `force` also deletes aliases that point to the version, and ends its requests on this server with an error.
    """
    is_forced = force in ("true", "1")
    gone = await delete(services, view, reference, force=is_forced, if_match=if_match)
    in_flight = services.engine.in_flight
    ended = in_flight.abort_adapter(gone.adapter_id, gone.versions) if is_forced else 0
    everywhere = services.registry.leases.everywhere(services.store.feed.revision) if wait == "all" else None
    waited_for = {} if everywhere is None else {"followers": await run_until_disconnect(request.receive, everywhere)}
    wait_s = 0.0 if wait == "all" else wait
    running = await run_until_disconnect(
        request.receive, in_flight.until_unused(gone.adapter_id, gone.versions, wait_s)
    )
    answer = {
        "object": "adapter.deleted",
        "id": reference,
        "deleted": True,
        "versions_removed": gone.num_versions,
        "aliases_removed": list(gone.aliases),
        "requests_ended": ended,
        "requests_running": running,
        **waited_for,
    }
    return JSONResponse(answer, 202 if wait != "all" and (running or not wait) else 200)


async def delete(
    services: Services,
    view: ScopedStore,
    reference: str,
    *,
    force: bool = False,
    if_match: Collection[str] | None = None,
) -> Deletion:
    """Delete as `AdapterStore.delete` does, and drop the engine's state for it.

    The engine drops the limits, and the pins and past answers that no remaining name can reach.
    """
    gone: Deletion = await run_in_threadpool(view.delete, reference, force=force, if_match=if_match)
    # Shielded from the client's disconnection: pins without a name would stay, and the limits would apply to the next
    # adapter of that name.
    await asyncio.shield(_forget(services, view, gone))
    return gone


async def _forget(services: Services, view: ScopedStore, gone: Deletion) -> None:
    record = view.records().get(gone.adapter_id)
    left = {version.key for version in record.versions} if record is not None else set()
    await services.ledger.forget(gone.adapter_id, {*gone.contents, None} - left)
    await services.forget_deleted([gone.adapter_id], gone.unnamed)
