"""Plan and admit a generation, for all protocols: OpenAI's routes, TGI's, and batches in this process."""

import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

from adapter_store.errors import AdapterError
from api.asgi.resumption import Resumption
from api.asgi.sse import EventStream, run_until_disconnect
from api.auth.principal import ANYBODY, Caller, Scope
from api.errors import ApiError
from api.replication.peer import PEER
from api.schemas.openai import ChatBody, CompletionBody, GenerationBody
from api.schemas.request_fields import RequestFields
from api.schemas.speculation import speculation_params
from api.serving.admission import AddPrompt, Prompt
from api.serving.answer_events import AnswerEvents, EventWriter
from api.serving.chat import plan_chat, vocab_size_of
from api.serving.choice_stream import ChoiceStream
from api.serving.logprobs import LogprobsFormatter, PromptEcho
from api.serving.model_resolver import ResolvedModel, resolve_target
from api.serving.openai_responses import (
    ChatFormat,
    CompletionFormat,
    ProtocolFormat,
    ResponseBuilder,
    system_fingerprint,
)
from api.serving.overflow import room_for_prompt
from api.serving.prompts import check_lengths, last_tokens, num_kept, token_ids
from api.serving.resumption import StreamResumption, seeded
from api.serving.services import Services
from api.serving.store_view import ScopedStore
from lorasrv.errors import InvalidRequest
from lorasrv.request import OnCold, RequestOptions, persona_salt
from lorasrv.sampling_params import PLAIN_TEXT, BeamOptions, SamplingParams, TextOptions
from lorasrv.text.reasoning_budget import ReasoningBudget
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.tokenizer import Tokenizer


class Writer(Protocol):
    """Write the response in a protocol's format: `ResponseBuilder`, `ResponsesWriter`, `TgiResponseBuilder`."""

    @property
    def answer_id(self) -> str:
        """Return the answer's id."""

    @property
    def created_s(self) -> int:
        """Return the answer's Unix time of creation."""

    @property
    def is_resumable(self) -> bool:
        """Return whether a stream can be resumed from its tokens."""

    def continuing(self, resumption: Resumption) -> "Writer":
        """Return a writer that continues a stream which another replica began."""

    async def collect(self, choices: ChoiceStream) -> tuple[Any, dict[str, str]]:
        """Return the whole response and its headers, and close the choices."""

    def event_writer(self, choices: ChoiceStream) -> EventWriter:
        """Return the writer of a stream's events."""

    def headers(self, choices: ChoiceStream) -> dict[str, str]:
        """Return the headers of a stream whose first output has arrived."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Describe what a body requests from the engine, and how to write the response."""

    writer: Writer
    request_id: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    # Number of answers per prompt.
    width: int
    grammar: Grammar | None = None
    text: TextOptions = PLAIN_TEXT
    budget: ReasoningBudget | None = None
    beams: BeamOptions | None = None

    @property
    def is_resumable(self) -> bool:
        """Return whether another replica can continue the stream: it has one answer, and its tokens determine it."""
        is_one = len(self.prompts) == self.width == 1 and self.beams is None and not self.sampling.prompt_only
        return is_one and self.writer.is_resumable


Planner = Callable[[Any, ResolvedModel, Services, Caller], Coroutine[Any, Any, GenerationPlan]]
"""Converts one protocol's fields to a plan, given the resolved model."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Hold an admitted request: its choices, which must be closed, and the writer of its response."""

    writer: Writer
    choices: ChoiceStream
    # Header that tells an edge how to resume the stream; empty if the edge did not ask for it, or the stream cannot be
    # resumed.
    offer: Mapping[str, str] = field(default_factory=dict)

    def events(self) -> AnswerEvents:
        """Return the events of the response as a stream."""
        return AnswerEvents(self.choices, self.writer.event_writer(self.choices))

    def headers(self) -> dict[str, str]:
        """Return the headers of a stream whose first output has arrived."""
        headers = self.writer.headers(self.choices)
        if any(output.timing.fell_back for output in self.choices.latest.values()):
            # Not resumable: the base answers here, but on another replica the adapter might.
            self.choices.mark_nothing()
            return headers
        return {**headers, **self.offer}


async def generate(
    plan: Planner,
    model: str | None,
    fields: RequestFields,
    services: Services,
    caller: Caller,
    turn: str | None = None,
    resumption: Resumption | None = None,
) -> Generation:
    """Plan and admit a request; all protocols use this function.

    Args:
        plan: the protocol's planner.
        model: `model` of the body; `fields.adapter_id` or `fields.adapters` can also name what answers.
        fields: fields that all protocols share, such as priority and cache_salt. The defaults of the version that
            answers are applied to them before planning.
        turn: for TGI, the only turn of the conversation, which `fields` do not contain.
        resumption: how an edge resumes the stream.
    Raises:
        LorasrvError, AdapterError, ApiError: the model does not exist, a field is invalid, or the request is refused.
    """
    await services.admission.check(caller)
    if resumption is not None and resumption.goes_on:
        fields = fields.model_copy(update=seeded(resumption))
    user = fields.user if isinstance(fields, GenerationBody) else None
    view = services.view(caller, user, None if resumption is None else resumption.versions)
    fields, target = await _resolve(model, fields, services, view, turn)
    planned = await plan(fields, target, services, caller)
    writer, resuming = planned.writer, None
    if resumption is not None:
        rules = planned.grammar, planned.budget
        resuming = StreamResumption(resumption, services.engine.fingerprint, planned.is_resumable, *rules)
        if resumption.goes_on:
            writer = writer.continuing(resumption)
    engine, options, own = services.engine, _options(planned, fields, target, caller), target.own_tokenizer
    # Requests may name any number of sums, so only stored sums may keep anything on disk.
    may_keep = not target.components or target.is_stored
    prefix = await services.prefixes.of_prompt(target.persona, planned.prompts[0]) if may_keep else None

    async def begin() -> AddPrompt:
        await services.limits.shares.prepare(options.adapter_id, len(planned.prompts) * planned.width)
        grammar = planned.grammar
        constraint = None if grammar is None else await engine.grammars.compile(grammar, caller.principal, own)
        if planned.budget is not None:
            constraint = replace(planned.budget, grammar=constraint)
        resumed = () if resuming is None else resuming.token_ids
        add = partial(
            engine.add_choices,
            sampling=planned.sampling,
            count=planned.width,
            options=replace(options, prefix=prefix, constraint=constraint, resumed_token_ids=resumed),
            request_id=planned.request_id,
            versions=target.versions,
        )
        return add if resuming is None else resuming.watched(add)

    try:
        streams = await services.admission.admit(caller, planned.prompts, planned.width, begin)
    except AdapterError as error:
        raise target.naming(error) from None
    choices = ChoiceStream(
        streams,
        planned.width,
        is_marked=resuming is not None and resuming.is_offered,
        is_resumed=resumption is not None and bool(resumption.token_ids),
        is_draining=lambda: services.draining.is_on,
        named=target.naming,
    )
    offer = {} if resuming is None else resuming.offer(writer.answer_id, writer.created_s, view.versions)
    return Generation(writer, choices, offer)


async def _resolve(
    model: str | None, fields: RequestFields, services: Services, view: ScopedStore, turn: str | None
) -> tuple[RequestFields, ResolvedModel]:
    """Return the version that answers, and the fields with its defaults."""
    names = model, fields.adapter_id, fields.adapters
    target = await services.looking_up(partial(resolve_target, *names, services.base_name, view))
    await services.personas.check_parts(target.components, view)
    ref = target.ref
    if ref is not None and ref.persona:
        if parts := await services.personas.parts(ref):
            target = target.summed(parts, view)
        fields, persona = await services.personas.apply(fields, ref, view, turn)
        target = replace(target, persona=persona)
    own = await services.engine.own_tokenizer(target.ref.key if target.ref is not None else None)
    return fields, replace(target, own_tokenizer=own)


async def generate_openai(
    body: GenerationBody, services: Services, caller: Caller, resumption: Resumption | None = None
) -> Generation:
    """Plan and admit a body of OpenAI's routes.

    Raises: as `generate`.
    """
    try:
        return await generate(_PLANNERS[type(body)], body.model, body, services, caller, resumption=resumption)
    except InvalidRequest as error:
        raise error.renamed({"max_tokens": body.limit_name}) from None


async def collect(generating: Awaitable[Generation]) -> tuple[Any, dict[str, str]]:
    """Return the whole response of a request and its headers.

    Raises:
        LorasrvError, AdapterError, ApiError: the request is refused, or a choice failed.
    """
    generation = await generating
    return await generation.writer.collect(generation.choices)


async def respond(receive: Receive, generating: Coroutine[Any, Any, Generation], *, streamed: bool) -> Response:
    """Respond to a request over HTTP.

    If the client disconnects, all work for it is cancelled: tokenizing, compiling a grammar, waiting, generating.
    """
    if not streamed:
        content, headers = await run_until_disconnect(receive, collect(generating))
        return JSONResponse(content, headers=headers)

    async def wait_for_first() -> Generation:
        generation = await generating
        # A failure before the first output still gets its own status code.
        await generation.choices.wait_for_first()
        return generation

    generation = await run_until_disconnect(receive, wait_for_first())
    headers = generation.headers()
    events = generation.events()
    return EventStream(events.chunks(), generation.choices.aclose, headers, events.push_to)


async def _plan_completion(
    body: CompletionBody, target: ResolvedModel, services: Services, caller: Caller
) -> GenerationPlan:
    grammar = await run_in_threadpool(body.grammar)
    text = body.text_options(strip_start=False)
    return await _plan(
        body,
        target,
        services,
        caller,
        prompts=body.prompts,
        protocol_format=CompletionFormat(),
        id_prefix="cmpl-",
        grammar=grammar,
        text=text,
    )


async def plan_conversation(
    body: ChatBody,
    target: ResolvedModel,
    services: Services,
    caller: Caller,
    write: Callable[[ChatFormat, ResponseBuilder], Writer] | None = None,
    id_prefix: str = "chatcmpl-",
) -> GenerationPlan:
    """Plan a chat.

    Args:
        write: returns a writer of another format than a chat's; None: write a chat.
        id_prefix: prefix of the answer's id.
    Raises:
        InvalidRequest, ApiError: a field is invalid.
    """
    texts = [body.messages, body.tools, body.chat_template_kwargs]
    plan = await services.in_thread(
        texts, partial(plan_chat, body, services.engine, target.persona, target.own_tokenizer), caller
    )
    return await _plan(
        body,
        target,
        services,
        caller,
        prompts=[plan.prompt],
        protocol_format=plan.protocol_format,
        id_prefix=id_prefix,
        grammar=plan.grammar,
        text=plan.text,
        budget=plan.budget,
        dropped_turns=plan.dropped_turns,
        write=write and partial(write, plan.protocol_format),
    )


_PLANNERS: dict[type[GenerationBody], Callable[..., Coroutine[Any, Any, GenerationPlan]]] = {
    CompletionBody: _plan_completion,
    ChatBody: plan_conversation,
}


async def _plan(
    body: GenerationBody,
    target: ResolvedModel,
    services: Services,
    caller: Caller,
    *,
    prompts: Sequence[Prompt],
    protocol_format: ProtocolFormat,
    id_prefix: str,
    grammar: Grammar | None,
    text: TextOptions,
    budget: ReasoningBudget | None = None,
    dropped_turns: int | None = None,
    write: Callable[[ResponseBuilder], Writer] | None = None,
) -> GenerationPlan:
    engine, options = services.engine, body.stream_options
    tokenizer = target.own_tokenizer or engine.tokenizer
    sampling, longest = body.sampling(vocab_size_of(engine, target.own_tokenizer)), engine.max_model_len
    if (kept := body.truncate_prompt_tokens) is not None:
        count = num_kept(kept, room_for_prompt(longest, sampling.max_tokens), longest)
        prompts = await services.in_thread(prompts, partial(last_tokens, prompts, count, tokenizer, longest), caller)
    echo = partial(_echoes, prompts, tokenizer, longest)
    echoes = await services.in_thread(prompts, echo, caller) if body.echoes else []
    prompts = [echo.token_ids for echo in echoes] or prompts
    if body.return_token_ids:
        prompts = await services.in_thread(prompts, partial(token_ids, prompts, tokenizer, longest), caller)
    builder = ResponseBuilder(
        answer_id=f"{id_prefix}{secrets.token_hex(12)}",
        target=target,
        protocol_format=protocol_format,
        include_usage=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
        shown=body.num_choices,
        logprobs_formatter=_logprobs_formatter(body, tokenizer),
        top=body.top_shown,
        prompt_top=body.prompt_logprobs,
        echoes=echoes,
        dropped_turns=dropped_turns,
        prompt_ids=[list(prompt) for prompt in prompts if not isinstance(prompt, str)]
        if body.return_token_ids
        else None,
        system_fingerprint=system_fingerprint(engine.fingerprint),
    )
    return GenerationPlan(
        writer=builder if write is None else write(builder),
        request_id=builder.answer_id,
        prompts=prompts,
        sampling=sampling,
        width=body.num_tried,
        grammar=grammar,
        text=text,
        budget=budget,
        # Beam search is useless if no answer is wanted.
        beams=None if sampling.prompt_only else body.beams,
    )


def _options(plan: GenerationPlan, fields: RequestFields, target: ResolvedModel, caller: Caller) -> RequestOptions:
    """Return the options that are known before the request is admitted.

    Raises: ApiError: 403, a negative priority needs a key of scope admin.
    """
    priority = fields.priority or 0
    if priority < 0 and not caller.may(Scope.ADMIN):
        # These requests precede all requests of priority 0, regardless of the keys' shares.
        raise ApiError(403, "priority below 0 requires a key of scope admin", code="forbidden", param="priority")
    return RequestOptions(
        adapter_key=target.ref.key if target.ref else None,
        principal=caller.principal,
        on_cold=fields.on_cold or OnCold.WAIT,
        cache_salt=_salt(fields.cache_salt, target, caller),
        adapter_id=target.ref.adapter_id if target.ref else "",
        charged_key=target.charged_key,
        priority=priority,
        timeout_s=fields.timeout_s,
        text=plan.text,
        beams=plan.beams,
        speculation=speculation_params(fields.speculation, fields.prediction, has_salt=bool(fields.cache_salt)),
        kv_policy=None if fields.kv_policy is None else fields.kv_policy.policy,
        peer=PEER.get(),
    )


def _salt(given: str | None, target: ResolvedModel, caller: Caller) -> str:
    """Return the salt; requests reuse each other's pages only if they have the same one.

    It consists of the client's salt, or else a salt of its key, and of the persona's if the prompt contains its texts.
    A client's salt never equals a key's.
    """
    own = "" if caller.principal == ANYBODY.principal else key_salt(caller.principal)
    salt = f"salt:{given}" if given else own
    return persona_salt(target.persona.prompt_key, salt) if target.persona and target.persona.prompt_key else salt


def key_salt(principal: str) -> str:
    """Return the salt for requests of a key that send none."""
    return f"key:{principal}"


def _logprobs_formatter(body: GenerationBody, tokenizer: Tokenizer) -> LogprobsFormatter | None:
    if body.top_shown is None and body.prompt_logprobs is None:
        return None
    return LogprobsFormatter(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))


def _echoes(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_model_len: int) -> list[PromptEcho]:
    """Prepare prompts that the response repeats.

    Raises: ContextLengthExceeded: a prompt is too long; checked before any prompt is tokenized.
    """
    check_lengths(prompts, tokenizer, max_model_len)
    return [PromptEcho.of(prompt, tokenizer) for prompt in prompts]
