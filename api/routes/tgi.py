"""Serve POST /generate, /generate_stream and /, compatible with text-generation-inference and LoRAX."""

import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from api.asgi.json_body import JsonRoute
from api.asgi.resumption import resumption_of
from api.auth.dependency import CallerDep
from api.auth.principal import Caller
from api.schemas.tgi import GenerateBody, Parameters
from api.serving.generation import GenerationPlan, generate, respond
from api.serving.model_resolver import ResolvedModel
from api.serving.openai_responses import CompletionFormat, ResponseBuilder
from api.serving.services import Services, ServicesDep
from api.serving.tgi_responses import TgiResponseBuilder, TokenWriter
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import TextOptions
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.reasoning import Markers, detect_markers
from lorasrv.text.tokenizer import Tokenizer, check_could_fit

router = APIRouter(route_class=JsonRoute)


@router.post("/generate")
async def tgi_generate(request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Continue a text, and respond when the answer is complete."""
    if body.stream:
        raise InvalidRequest("stream is not served here; use /generate_stream", param="stream")
    return await _answer(request, body, services, caller, streamed=False)


@router.post("/generate_stream")
async def tgi_generate_stream(
    request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep
) -> Response:
    """Continue a text, and stream one event per token."""
    return await _answer(request, body, services, caller, streamed=True)


@router.post("/")
async def tgi_root(request: Request, body: GenerateBody, services: ServicesDep, caller: CallerDep) -> Response:
    """Respond like /generate_stream if `stream` is true, and otherwise like /generate with the answer in a list."""
    return await _answer(request, body, services, caller, streamed=bool(body.stream), as_list=True)


async def _answer(
    request: Request, body: GenerateBody, services: Services, caller: Caller, *, streamed: bool, as_list: bool = False
) -> Response:
    parameters = body.wanted(streamed)
    # Without a model, the base answers.
    model = body.model or services.base_name
    plan = partial(_plan, body, streamed, as_list)
    turn = body.inputs if parameters.apply_chat_template else None
    generating = generate(plan, model, parameters, services, caller, turn, resumption_of(request))
    return await respond(request.receive, generating, streamed=streamed)


async def _plan(
    body: GenerateBody,
    streamed: bool,
    as_list: bool,
    parameters: Parameters,
    target: ResolvedModel,
    services: Services,
    caller: Caller,
) -> GenerationPlan:
    needs_tokens = streamed or parameters.details or parameters.decoder_input_details or parameters.num_choices > 1
    # 53 bits, which JSON parsers that use doubles read exactly.
    seed = parameters.seed if parameters.seed is not None else secrets.randbits(53)
    drawn = seed if parameters.is_sampled else None
    sampling = parameters.sampling(drawn, with_tokens=bool(needs_tokens))
    if target.persona is not None:
        sampling = target.persona.with_tokens(sampling)
    prompt = await services.in_thread(body.inputs, partial(_prompt_ids, body, parameters, target, services), caller)
    grammar = await run_in_threadpool(parameters.wanted_grammar)
    figures = ResponseBuilder(f"gen-{secrets.token_hex(12)}", target, CompletionFormat())
    tokens = TokenWriter(
        _tokenizer(target, services), parameters.top_n_tokens or 0, parameters.return_k_alternatives or 0
    )
    writer = TgiResponseBuilder(figures, parameters, body.inputs, prompt, drawn, tokens, as_list)
    # As in TGI, the answer keeps the stop sequence that ended it. Without a chat template, it also keeps a leading
    # space, because it continues the prompt's text; with a grammar, because the grammar says how the text begins.
    markers = _markers(parameters, services) if grammar is None else None
    shown = frozenset[int]() if markers is None else markers.shown(_tokenizer(target, services))
    strip_start = bool(parameters.apply_chat_template) and grammar is None
    text = TextOptions(shown_token_ids=shown, strip_start=strip_start, keep_stop=True)
    return GenerationPlan(
        writer=writer,
        request_id=figures.answer_id,
        prompts=[prompt],
        sampling=sampling,
        width=parameters.num_choices,
        grammar=grammar,
        text=text,
    )


def _markers(parameters: Parameters, services: Services) -> Markers | None:
    """Return the markers of reasoning, which stay in the text; None if there are none."""
    template = services.engine.chat_template
    return detect_markers(template.source) if parameters.apply_chat_template and template is not None else None


def _tokenizer(target: ResolvedModel, services: Services) -> Tokenizer:
    return target.own_tokenizer or services.engine.tokenizer


def _prompt_ids(body: GenerateBody, parameters: Parameters, target: ResolvedModel, services: Services) -> list[int]:
    """Return the prompt's tokens; if `truncate` is set, only the last `truncate` ones, as in TGI."""
    tokenizer, longest = _tokenizer(target, services), services.engine.max_model_len - 1
    if parameters.truncate is not None and parameters.truncate > longest:
        raise InvalidRequest(f"truncate must be between 1 and {longest}", param="truncate")
    check_could_fit([body.inputs], tokenizer, longest)
    if not parameters.apply_chat_template:
        ids = tokenizer.encode(body.inputs)
    elif (template := services.engine.chat_template) is not None:
        ids = _conversation(body.inputs, target, template, tokenizer)
    else:
        raise InvalidRequest("apply_chat_template: this base has no chat template", param="apply_chat_template")
    return ids if parameters.truncate is None else ids[-parameters.truncate :]


def _conversation(inputs: str, target: ResolvedModel, template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a conversation: the persona's texts, then one turn."""
    plain: list[dict[str, Any]] = [{"role": "user", "content": inputs}]
    if (persona := target.persona) is None:
        return template.encode(plain, tokenizer)
    variables = template.checked_variables(persona.template_kwargs)
    with persona.hiding_errors():
        return template.encode([message.plain() for message in persona.messages] or plain, tokenizer, **variables)
