"""Serve POST /v1/chat/completions, /v1/completions and /v1/responses."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.asgi.json_body import JsonRoute
from api.asgi.resumption import resumption_of
from api.auth.dependency import CallerDep
from api.schemas.openai import ChatBody, CompletionBody
from api.schemas.responses import ResponsesBody
from api.serving.generation import generate_openai, respond
from api.serving.responses_api import generate_response
from api.serving.services import ServicesDep

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Continue one or more prompts."""
    return await respond(
        request.receive, generate_openai(body, services, caller, resumption_of(request)), streamed=bool(body.stream)
    )


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Answer a conversation."""
    return await respond(
        request.receive, generate_openai(body, services, caller, resumption_of(request)), streamed=bool(body.stream)
    )


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Answer a conversation, in items and typed events. Nothing is stored."""
    return await respond(
        request.receive, generate_response(body, services, caller, resumption_of(request)), streamed=bool(body.stream)
    )
