"""Refuse unsupported routes of the OpenAI and Anthropic APIs that clients try; name the alternative."""

from fastapi import APIRouter
from starlette.responses import Response

from api.errors import ApiError

router = APIRouter()


@router.get("/v1/embeddings", include_in_schema=False)
@router.post("/v1/embeddings")
async def embeddings() -> Response:
    """Respond that embeddings are not supported: the models here generate text."""
    raise _not_served("/v1/embeddings", "the models here generate text")


@router.get("/v1/messages", include_in_schema=False)
@router.post("/v1/messages")
async def messages() -> Response:
    """Respond that the route is not supported: use /v1/chat/completions."""
    raise _not_served("/v1/messages", "use /v1/chat/completions")


def _not_served(path: str, instead: str) -> ApiError:
    return ApiError(404, f"{path} is not served by this server: {instead}", code="not_served")
