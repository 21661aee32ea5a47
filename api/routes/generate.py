"""POST /v1/chat/completions and /v1/completions."""

import secrets
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from api.answers import AnswerWriter, ChatWording, CompletionWording, Wording, generation_failed
from api.json_body import JsonRoute
from api.naming import Target, resolve_target
from api.schemas.generation import ChatBody, CompletionBody, GenerationBody
from api.services import Services, ServicesDep
from api.sse import EventStream, unless_disconnected
from lorasrv.errors import InvalidRequest
from lorasrv.request import FinishReason, RequestOutput

if TYPE_CHECKING:
    from lorasrv.async_engine import RequestStream

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody, services: ServicesDep) -> Response:
    """Continue one prompt."""
    target = await _target(body, services)
    return await _answer(request, body, services, target, body.prompt, CompletionWording())


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody, services: ServicesDep) -> Response:
    """Answer a conversation."""
    target = await _target(body, services)
    prompt = await run_in_threadpool(_chat_prompt, body, services)
    return await _answer(request, body, services, target, prompt, ChatWording())


async def _target(body: GenerationBody, services: Services) -> Target:
    # In a thread: near names for one that is unknown take milliseconds with thousands of adapters.
    return await run_in_threadpool(
        resolve_target, body.model, body.adapter_id, services.base_name, services.store.resolve
    )


def _chat_prompt(body: ChatBody, services: Services) -> list[int]:
    template = services.engine.chat_template
    if template is None:
        raise InvalidRequest("this base has no chat template; use /v1/completions", param="messages")
    return template.encode([message.plain() for message in body.messages], services.engine.tokenizer)


async def _answer(
    request: Request,
    body: GenerationBody,
    services: Services,
    target: Target,
    prompt: str | Sequence[int],
    wording: Wording,
) -> Response:
    sampling = body.sampling(services.engine.spec.vocab_size)
    options = body.stream_options
    writer = AnswerWriter(
        answer_id=f"{wording.id_prefix}-{secrets.token_hex(12)}",
        target=target,
        wording=wording,
        include_usage=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
    )
    key = target.ref.key if target.ref else None
    accepted = services.engine.add(prompt, sampling, adapter=key, request_id=writer.answer_id)
    if body.stream:
        return await _streamed(request, writer, accepted)
    content, headers = await unless_disconnected(request.receive, _collected(writer, accepted))
    return JSONResponse(content, headers=headers)


async def _collected(
    writer: AnswerWriter, accepted: "Awaitable[RequestStream]"
) -> tuple[dict[str, object], dict[str, str]]:
    return await writer.collect(await accepted)


async def _streamed(request: Request, writer: AnswerWriter, accepted: "Awaitable[RequestStream]") -> Response:
    """Opens only after the engine's first output, so that a failure until then keeps its own status."""
    first, stream = await unless_disconnected(request.receive, _opened(writer, accepted))
    return EventStream(writer.chunks(first, stream), stream.aclose, writer.headers(first.timing))


async def _opened(writer: AnswerWriter, accepted: "Awaitable[RequestStream]") -> "tuple[RequestOutput, RequestStream]":
    stream = await accepted
    try:
        first = await writer.next(stream)
        if first.finish_reason is FinishReason.ERROR:
            raise generation_failed(first)
    except BaseException:
        await stream.aclose()
        raise
    return first, stream
