"""What runs here: /info, /version, /ping."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from api.services import ServicesDep
from lorasrv import __version__
from lorasrv.models.operations import operations
from lorasrv.request import MAX_CHOICES
from lorasrv.sampling import MAX_STOP_STRINGS

router = APIRouter()


@router.get("/ping")
async def ping() -> Response:
    """The process answers; /health says whether the engine does."""
    return Response(media_type="text/plain")


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


@router.get("/info")
async def info(services: ServicesDep) -> dict[str, Any]:
    """What runs here: the fields of TGI's and LoRAX's /info that mean something here, and our own."""
    engine, settings = services.engine, services.settings
    snapshot = engine.metrics.snapshot()
    return {
        "model_id": services.base_name,
        "model_sha": None,
        "model_dtype": settings.dtype,
        "model_pipeline_tag": "text-generation",
        "quantization": engine.quantization,
        "max_concurrent_requests": settings.max_queued,
        "max_batch_size": settings.max_num_seqs,
        "max_best_of": MAX_CHOICES,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_client_batch_size": 1,
        "max_total_tokens": engine.max_model_len,
        "max_input_length": engine.max_model_len - 1,
        "max_input_tokens": engine.max_model_len - 1,
        "max_lora_rank": settings.max_lora_rank,
        "weight_bytes": snapshot.weight_bytes,
        "kv_token_bytes": snapshot.pool_bytes // max(1, snapshot.pages_total * engine.page_size_tokens),
        "operations": operations(engine.spec).to_dict(),
        "router": "lorasrv",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
