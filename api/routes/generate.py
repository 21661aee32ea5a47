"""POST /v1/chat/completions and /v1/completions."""

import secrets
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from api.answers import AnswerWriter, ChatWording, CompletionWording, Wording
from api.choices import Choices
from api.json_body import JsonRoute
from api.naming import Target, resolve_target
from api.schemas.generation import ChatBody, CompletionBody, GenerationBody
from api.services import Services, ServicesDep
from api.sse import EventStream, unless_disconnected
from lorasrv.errors import InvalidRequest
from lorasrv.request import OnCold

if TYPE_CHECKING:
    from lorasrv.request_stream import RequestStream

    Accepted = Coroutine[Any, Any, list[RequestStream]]

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
    accepted = services.engine.add_choices(
        prompt,
        sampling,
        body.num_choices,
        request_id=writer.answer_id,
        adapter=target.ref.key if target.ref else None,
        on_cold=body.on_cold or OnCold.WAIT,
        cache_salt=body.cache_salt or "",
        adapter_id=target.ref.adapter_id if target.ref else "",
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
    )
    if body.stream:
        return await _streamed(request, writer, accepted)
    content, headers = await unless_disconnected(request.receive, _collected(writer, accepted))
    return JSONResponse(content, headers=headers)


async def _collected(writer: AnswerWriter, accepted: "Accepted") -> tuple[dict[str, object], dict[str, str]]:
    return await writer.collect(Choices(await accepted))


async def _streamed(request: Request, writer: AnswerWriter, accepted: "Accepted") -> Response:
    """Opens only after the engine's first output, so that a failure until then keeps its own status."""
    choices = await unless_disconnected(request.receive, _opened(accepted))
    return EventStream(writer.chunks(choices), choices.aclose, writer.headers(choices))


async def _opened(accepted: "Accepted") -> Choices:
    choices = Choices(await accepted)
    try:
        await choices.wait_for_first()
    except BaseException:
        await choices.aclose()
        raise
    return choices
