"""Serve vLLM's routes that load and unload adapters.

They load folders on the server's machine, if its operator allows that.
"""

import contextlib

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterExists, AdapterNotFound, InvalidAdapterId, show
from adapter_store.registry.records import Registration
from api.asgi.json_body import JsonRoute
from api.config.lora_modules import ImportRoot, add_folder
from api.errors import ApiError
from api.routes.adapters import delete
from api.schemas.adapters import LoadBody, UnloadBody
from api.serving.model_resolver import ResolvedModel
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.store_view import ScopedStore

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadBody, services: ServicesDep, view: ViewDep) -> PlainTextResponse:
    """Register a folder below the import root under a name; `load_inplace` adds a version to an existing name."""
    root = _import_root(services)
    if not body.lora_name or not body.lora_path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", code="invalid_value")
    done = await run_in_threadpool(_add, services, view, root, body)
    text = f"Success: LoRA adapter '{done.ref.adapter_id}' added successfully."
    return PlainTextResponse(text, headers=ResolvedModel(body.lora_name, done.ref).headers)


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadBody, services: ServicesDep, view: ViewDep) -> PlainTextResponse:
    """Delete an id with all its versions, as DELETE /v1/adapters does; running requests finish."""
    _import_root(services)
    try:
        # Accept ids only: vLLM's clients do not name versions (`mia@3`).
        record = await run_in_threadpool(view.get, body.lora_name)
        await delete(services, view, record.adapter_id)
    except AdapterNotFound:
        message = f"The lora adapter {show(body.lora_name)} cannot be found."
        raise ApiError(404, message, code="model_not_found", param="lora_name") from None
    return PlainTextResponse(f"Success: LoRA adapter '{record.adapter_id}' removed successfully.")


def _import_root(services: Services) -> ImportRoot:
    root = services.settings.lora_import_root
    if root is None:
        message = (
            "this server takes no adapters by path: start it with --lora-import-root DIR to let requests name folders "
            "below DIR, or send the files (lorasrv upload)"
        )
        raise ApiError(403, message, code="runtime_loading_disabled")
    return ImportRoot(root)


def _add(services: Services, view: ScopedStore, root: ImportRoot, body: LoadBody) -> Registration:
    folder = root.folder(body.lora_path)
    try:
        view.check_may_name(body.lora_name, "lora_name")
        if not body.load_inplace:
            _check_new(view, body.lora_name)
        with view.hide_usage_of_others():
            return add_folder(
                services.store,
                folder,
                body.lora_name,
                if_not_exists=not body.load_inplace,
                opener=root.open,
                tokenizer=lambda: services.engine.tokenizer,
                **view.owner,
            )
    except AdapterExists:
        message = (
            f"The lora adapter {show(body.lora_name)} has already been loaded. If you want to load the adapter in "
            "place, set 'load_inplace' to True."
        )
        raise ApiError(400, message, code="adapter_exists", param="lora_name") from None
    except InvalidAdapterId as error:
        raise ApiError(400, str(error), code="invalid_adapter_id", param="lora_name") from None
    except OSError:
        raise ApiError(
            400, "the server cannot read the adapter's files", code="unreadable_adapter", param="lora_path"
        ) from None


def _check_new(view: ScopedStore, name: str) -> None:
    """Check that the name is free before reading the folder.

    Raises: AdapterExists.
    """
    with contextlib.suppress(AdapterNotFound):
        view.get(name)
        raise AdapterExists(name)
