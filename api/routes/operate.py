"""Health, readiness and figures."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from api.metrics.registry import as_text, collected
from api.services import Services, ServicesDep

router = APIRouter()

# Without a watchdog a stalled engine still is none that lives.
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
    problem = "draining" if services.draining.is_on else _health_problem(services)
    if problem is None and not await services.store_probe.is_writable():
        problem = "store not writable"
    if problem is None:
        return JSONResponse({"status": "ready", "model": services.base_name})
    return JSONResponse({"status": problem}, 503, {"retry-after": "10"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    text = await run_in_threadpool(as_text, collected(request.app.state.registry))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _health_problem(services: Services) -> str | None:
    if not services.engine.is_alive:
        return "engine dead"
    limit_s = services.settings.watchdog_s or STALLED_AFTER_S
    return "engine stalled" if services.engine.heartbeat.is_stuck(limit_s) else None
