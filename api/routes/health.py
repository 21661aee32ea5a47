"""Serve server information, health and metrics: /info, /version, /ping, /health, /ready, /metrics, and GET /."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.asgi.query import OF_ONE_SERVER
from api.observability.metrics.registry import as_text, collected
from api.serving.services import ServicesDep
from lorasrv import __version__
from lorasrv.models.spec import operations
from lorasrv.sampling_params import MAX_CHOICES, MAX_STOP_STRINGS

router = APIRouter()


@router.get("/ping")
async def ping() -> Response:
    """Return 200 while the process responds; /health reports the engine."""
    return Response(media_type="text/plain")


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the server's version."""
    return {"version": __version__}


@router.get("/info", dependencies=OF_ONE_SERVER)
async def info(services: ServicesDep) -> dict[str, Any]:
    """Return the model and settings: the fields of TGI's and LoRAX's /info that apply here, and our own."""
    engine, settings = services.engine, services.settings
    stats = engine.metrics.stats()
    return {
        "model_id": services.base_name,
        "model_sha": None,
        "model_dtype": settings.dtype,
        "model_pipeline_tag": "text-generation",
        "quantization": engine.quantization,
        "max_concurrent_requests": settings.max_num_queued_seqs,
        "max_batch_size": settings.max_num_seqs,
        "max_best_of": MAX_CHOICES,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_client_batch_size": 1,
        "max_total_tokens": engine.max_model_len,
        "max_input_length": engine.max_model_len - 1,
        "max_input_tokens": engine.max_model_len - 1,
        "max_lora_rank": settings.max_lora_rank,
        "weight_bytes": stats.weight_bytes,
        "kv_token_bytes": stats.pool_bytes // max(1, stats.pages_total * engine.page_size_tokens),
        "operations": operations(engine.spec).to_dict(),
        "router": "lorasrv",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


@router.get("/health")
async def health(services: ServicesDep) -> JSONResponse:
    """Return 200 while the engine is alive: its thread runs, and completes steps while there is work."""
    problem = services.health_problem
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": problem}, 503)


@router.get("/")
async def root(request: Request, services: ServicesDep) -> Response:
    """Redirect browsers to the console; respond to other clients as /health does, like TGI."""
    if "text/html" not in request.headers.get("accept", ""):
        return await health(services)
    # The address is relative, so that it works behind a proxy that adds a path prefix.
    return RedirectResponse("console", headers={"vary": "accept"})


@router.get("/ready")
async def ready(services: ServicesDep) -> JSONResponse:
    """Return 200 while the server should receive requests."""
    problem = services.ready_problem
    if problem is None and not await services.store_probe.is_writable():
        problem = "store not writable"
    if problem is None:
        return JSONResponse({"status": "ready", "model": services.base_name})
    return JSONResponse({"status": problem}, 503, {"retry-after": "10"})


@router.get("/metrics", dependencies=OF_ONE_SERVER)
async def metrics(request: Request) -> Response:
    """Return metrics as Prometheus text."""
    if (residents := request.app.state.residents) is not None:
        await residents.look()
    text = await run_in_threadpool(as_text, collected(request.app.state.registry))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
