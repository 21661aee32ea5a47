"""Health, readiness, figures and facts."""

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request

from api.services import Services, ServicesDep
from lorasrv import __version__
from lorasrv.models.operations import operations

router = APIRouter()

# A step takes milliseconds, on a slow CPU with a full prefill budget a few seconds.
STALLED_AFTER_S = 60.0


@router.get("/health")
async def health(services: ServicesDep) -> JSONResponse:
    """Live: the engine's thread runs, and steps while there is work."""
    problem = _health_problem(services)
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": problem}, 503)


@router.get("/ready")
async def ready(services: ServicesDep) -> JSONResponse:
    """Whether requests should be sent here."""
    problem = _health_problem(services)
    if problem is None and not services.store.is_writable:
        problem = "store not writable"
    if problem is None:
        return JSONResponse({"status": "ready", "model": services.base_name})
    return JSONResponse({"status": problem}, 503, {"retry-after": "10"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/info")
async def info(services: ServicesDep) -> dict[str, Any]:
    """What runs here, in the words of text-generation-inference."""
    engine, settings = services.engine, services.settings
    snapshot = engine.metrics.snapshot()
    return {
        "model_id": services.base_name,
        "model_dtype": settings.dtype,
        "quantization": engine.quantization,
        "max_total_tokens": engine.max_model_len,
        "max_input_length": engine.max_model_len - 1,
        "max_lora_rank": settings.max_lora_rank,
        "weight_bytes": snapshot.weight_bytes,
        "kv_token_bytes": snapshot.pool_bytes // max(1, snapshot.pages_total * engine.page_size_tokens),
        "operations": operations(engine.spec).to_dict(),
        "router": "lorasrv",
        "version": __version__,
    }


def _health_problem(services: Services) -> str | None:
    if not services.engine.is_alive:
        return "engine dead"
    snapshot = services.engine.metrics.snapshot()
    if snapshot.requests_running and time.monotonic() - snapshot.last_step_s > STALLED_AFTER_S:
        return "engine stalled"
    return None
