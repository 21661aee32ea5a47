"""Serve GET /v1/replica: this server's state for the edges of its cluster."""

from typing import Any

from fastapi import APIRouter

from api.replication.headers import REPLICA
from api.serving.services import ServicesDep
from lorasrv.engine.replica_load import ReplicaLoad

router = APIRouter()


@router.get(REPLICA, include_in_schema=False)
async def show_replica(services: ServicesDep) -> dict[str, Any]:
    """Return the base's name, the engine's fingerprint, the cost of steps in seconds, and the current load."""
    # Read these first: a registry without an engine refuses them.
    fingerprint, figures = services.engine.fingerprint, services.engine.metrics.stats()
    load = ReplicaLoad.of(figures)
    return {
        "model": services.base_name,
        "fingerprint": fingerprint,
        "step_costs": dict(figures.step_costs),
        "is_ready": services.ready_problem is None,
        "requests": load.requests,
        "seconds_ahead": load.seconds_ahead,
        "adapters": figures.adapters_resident,
    }
