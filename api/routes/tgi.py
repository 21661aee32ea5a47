"""POST /generate, /generate_stream and /: as text-generation-inference and LoRAX have them."""

import secrets
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from api.asgi.json_body import JsonRoute
from api.asgi.sse import EventStream, run_until_disconnect
from api.auth.principal import Caller, CallerDep
from api.schemas.tgi import GenerateBody, Parameters
from api.serving.choice_stream import ChoiceStream
from api.serving.model_resolver import ResolvedModel, resolve_target
from api.serving.openai_responses import CompletionFormat, ResponseBuilder
from api.serving.services import Services, ServicesDep
from api.serving.serving_openai import service_of
from api.serving.tgi_responses import TgiResponseBuilder, TokenWriter
from lorasrv.engine.input_processor import check_could_fit
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.outputs import OutputStream

if TYPE_CHECKING:
    from api.auth.rate_limits import Add

Accepted = Coroutine[Any, Any, list[OutputStream]]
router = APIRouter(route_class=JsonRoute)


@router.post("/generate")
async def tgi_generate(request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Continue a text, and answer when it is done."""
    if body.stream:
        raise InvalidRequest("stream is not served here; use /generate_stream", param="stream")
    return await _whole(request, body, services, caller, as_list=False)


@router.post("/generate_stream")
async def tgi_generate_stream(
    request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep
) -> Response:
    """Continue a text, one event a token."""
    return await _streamed(request, body, services, caller)


@router.post("/")
async def tgi_root(request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep) -> Response:
    """As /generate_stream if `stream` is true, else as /generate with the answer in a list."""
    if body.stream:
        return await _streamed(request, body, services, caller)
    return await _whole(request, body, services, caller, as_list=True)


async def _whole(request: Request, body: GenerateBody, services: Services, caller: Caller, as_list: bool) -> Response:
    parameters = body.wanted(stream=False)
    told = bool(parameters.details or parameters.decoder_input_details or parameters.num_choices > 1)

    async def collect() -> tuple[dict[str, Any], dict[str, str]]:
        writer, accepted = await _begin(body, parameters, services, caller, with_tokens=told)
        return await writer.collect(ChoiceStream(await accepted))

    content, headers = await run_until_disconnect(request.receive, collect())
    return JSONResponse([content] if as_list else content, headers=headers)


async def _streamed(request: Request, body: GenerateBody, services: Services, caller: Caller) -> Response:
    """Opens only after the engine's first output, so that a failure until then keeps its own status."""
    parameters = body.wanted(stream=True)

    async def opened() -> tuple[TgiResponseBuilder, ChoiceStream]:
        writer, accepted = await _begin(body, parameters, services, caller, with_tokens=True)
        choices = ChoiceStream(await accepted)
        await choices.wait_for_first()
        return writer, choices

    writer, choices = await run_until_disconnect(request.receive, opened())
    return EventStream(writer.events(choices), choices.aclose, writer.headers(choices, ended=False))


async def _begin(
    body: GenerateBody, parameters: Parameters, services: Services, caller: Caller, with_tokens: bool
) -> tuple[TgiResponseBuilder, Accepted]:
    services.check_room(caller)
    # 53 bits: a JSON reader that has only doubles reads them back as they are.
    seed = parameters.seed if parameters.seed is not None else secrets.randbits(53)
    drawn = seed if parameters.is_sampled else None
    sampling = parameters.sampling(drawn, with_tokens)
    target = await run_in_threadpool(_target, body, parameters, services, caller)
    prompt = await services.in_thread(body.inputs, partial(_prompt_ids, body, parameters, services), caller)
    grammar = await run_in_threadpool(parameters.wanted_grammar)
    figures = ResponseBuilder(f"gen-{secrets.token_hex(12)}", target, CompletionFormat())
    tokens = TokenWriter(services.engine.tokenizer, parameters.top_n_tokens or 0, parameters.return_k_alternatives or 0)
    service = service_of(parameters, target, caller)

    async def begin() -> "Add[list[int]]":
        return partial(
            services.engine.add_choices,
            sampling=sampling,
            count=parameters.num_choices,
            **service,
            request_id=figures.answer_id,
            constraint=await services.engine.grammars.compile(grammar, caller.principal)
            if grammar is not None
            else None,
        )

    accepting = services.allowances.admit(caller, [prompt], parameters.num_choices, begin)
    return TgiResponseBuilder(figures, parameters, body.inputs, prompt, drawn, tokens), _in_tgi_words(accepting)


async def _in_tgi_words(accepting: Accepted) -> list[OutputStream]:
    try:
        return await accepting
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(str(error).replace("(max_tokens)", "(max_new_tokens)")) from None


def _target(body: GenerateBody, parameters: Parameters, services: Services, caller: Caller) -> ResolvedModel:
    """Who answers. In TGI's bodies a request that names nobody asks the base."""
    model = body.model or services.base_name
    return resolve_target(model, parameters.adapter_id, services.base_name, services.view(caller).resolve)


def _prompt_ids(body: GenerateBody, parameters: Parameters, services: Services) -> list[int]:
    """The prompt's tokens; of too many the last `truncate`, as TGI does it."""
    tokenizer, longest = services.engine.tokenizer, services.engine.max_model_len - 1
    if parameters.truncate is not None and parameters.truncate > longest:
        raise InvalidRequest(f"truncate must be between 1 and {longest}", param="truncate")
    if parameters.truncate is None:
        check_could_fit([body.inputs], tokenizer, longest, "inputs")
    if not parameters.apply_chat_template:
        ids = tokenizer.encode(body.inputs)
    elif (template := services.engine.chat_template) is not None:
        ids = template.encode([{"role": "user", "content": body.inputs}], tokenizer)
    else:
        raise InvalidRequest("apply_chat_template: this base has no chat template", param="apply_chat_template")
    return ids if parameters.truncate is None else ids[-parameters.truncate :]
