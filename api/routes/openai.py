"""POST /v1/chat/completions and /v1/completions."""

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.asgi.json_body import JsonRoute
from api.asgi.sse import EventStream, run_until_disconnect
from api.auth.principal import CallerDep
from api.schemas.openai import ChatBody, CompletionBody
from api.serving.choice_stream import ChoiceStream
from api.serving.openai_responses import Json, ResponseBuilder
from api.serving.services import ServicesDep
from api.serving.serving_openai import Generation, prepare_chat, prepare_completion

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Continue one prompt, or several."""
    return await _answer(request, prepare_completion(body, services, caller), streamed=bool(body.stream))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Answer a conversation."""
    return await _answer(request, prepare_chat(body, services, caller), streamed=bool(body.stream))


async def _answer(request: Request, preparing: Coroutine[Any, Any, Generation], *, streamed: bool) -> Response:
    """Whatever is done for a client that has left ends: tokenizing and compiling a grammar, waiting, generating."""

    async def collected() -> tuple[Json, dict[str, str]]:
        return await (await preparing).collect()

    async def opened() -> tuple[ResponseBuilder, ChoiceStream]:
        generation = await preparing
        return generation.writer, await generation.open()

    if not streamed:
        content, headers = await run_until_disconnect(request.receive, collected())
        return JSONResponse(content, headers=headers)
    # Opens only after the engine's first output, so that a failure until then keeps its own status.
    writer, choices = await run_until_disconnect(request.receive, opened())
    return EventStream(writer.chunks(choices), choices.aclose, writer.headers(choices))
