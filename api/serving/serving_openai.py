"""A body to an answer, for whoever asks: routes, and batches in this process."""

import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from api.auth.principal import ANYBODY, Caller, Scope
from api.errors import ApiError
from api.schemas.openai import ChatBody, CompletionBody, GenerationBody
from api.schemas.tgi import Parameters
from api.serving.chat import plan_chat
from api.serving.choice_stream import ChoiceStream
from api.serving.logprobs import LogprobsFormatter, PromptEcho
from api.serving.model_resolver import ResolvedModel, resolve_target
from api.serving.openai_responses import CompletionFormat, Json, ProtocolFormat, ResponseBuilder
from api.serving.services import Services
from lorasrv.engine.input_processor import check_could_fit
from lorasrv.errors import ContextLengthExceeded
from lorasrv.outputs import OutputStream
from lorasrv.request import OnCold
from lorasrv.text.structured_output.grammar import Grammar

if TYPE_CHECKING:
    from api.auth.rate_limits import Add
    from lorasrv.engine.async_engine import AsyncEngine

Accept = Callable[[], Coroutine[Any, Any, list[OutputStream]]]
Prompts = Sequence[str | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that is understood, and not yet accepted: `accept` asks limits and engine for the choices to all of its
    prompts, `width` to each, or raises why one of them is refused; then none of them is accepted."""

    writer: ResponseBuilder
    width: int
    unanswered: bool
    accept: Accept

    async def collect(self) -> tuple[Json, dict[str, str]]:
        """The whole answer and its headers.

        Raises:
            LorasrvError, AdapterError, ApiError: it is refused, or a choice has failed.
        """
        return await self.writer.collect(await self._accepted())

    async def open(self) -> ChoiceStream:
        """The choices, of which one has said something, so that a failure until then is told as `collect` tells it."""
        choices = await self._accepted()
        await choices.wait_for_first()
        return choices

    async def _accepted(self) -> ChoiceStream:
        return ChoiceStream(await self.accept(), self.width, unanswered=self.unanswered)


async def prepare_completion(body: CompletionBody, services: Services, caller: Caller) -> Generation:
    """Raises: LorasrvError, AdapterError, ApiError: nobody answers to that name, a field is wrong, or the key has used
    what it may."""
    target = await _target(body, services, caller)
    grammar = await run_in_threadpool(body.grammar)
    return await _prepare(body, services, caller, target, body.prompts, CompletionFormat(), grammar)


async def prepare_chat(body: ChatBody, services: Services, caller: Caller) -> Generation:
    """Raises: as `prepare_completion`."""
    target = await _target(body, services, caller)
    said = [body.messages, body.tools, body.chat_template_kwargs]
    plan = await services.in_thread(said, partial(plan_chat, body, services.engine), caller)
    shown = plan.shown_token_ids
    return await _prepare(body, services, caller, target, [plan.prompt], plan.wording, plan.grammar, shown)


async def _target(body: GenerationBody, services: Services, caller: Caller) -> ResolvedModel:
    services.check_room(caller)
    # In a thread: near names for one that is unknown take milliseconds with thousands of adapters.
    resolve = services.view(caller).resolve
    return await run_in_threadpool(resolve_target, body.model, body.adapter_id, services.base_name, resolve)


async def _prepare(
    body: GenerationBody,
    services: Services,
    caller: Caller,
    target: ResolvedModel,
    prompts: Prompts,
    wording: ProtocolFormat,
    grammar: Grammar | None,
    shown_token_ids: frozenset[int] = frozenset(),
) -> Generation:
    engine, options = services.engine, body.stream_options
    sampling = body.sampling(engine.spec.vocab_size)
    echoes = await services.in_thread(prompts, partial(_echoes, prompts, engine), caller) if body.echoes else []
    writer = ResponseBuilder(
        answer_id=f"{wording.id_prefix}-{secrets.token_hex(12)}",
        target=target,
        wording=wording,
        include_usage=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
        shown=body.num_choices,
        speller=_speller(body, services),
        top=body.top_shown,
        prompt_top=body.prompt_logprobs,
        echoes=echoes,
    )
    service = service_of(body, target, caller)

    async def begin() -> "Add[str | Sequence[int]]":
        return partial(
            engine.add_choices,
            sampling=sampling,
            count=body.num_tried,
            **service,
            request_id=writer.answer_id,
            constraint=await engine.grammars.compile(grammar, caller.principal) if grammar is not None else None,
            shown_token_ids=shown_token_ids,
            beams=body.beams,
        )

    wanted = [echo.token_ids for echo in echoes] or prompts
    accept = partial(services.allowances.admit, caller, wanted, body.num_tried, begin)
    return Generation(writer, body.num_tried, body.unanswered, accept)


def service_of(body: GenerationBody | Parameters, target: ResolvedModel, caller: Caller) -> dict[str, Any]:
    """Who asks, who is to answer, how soon, and what it may share: for `AsyncEngine.add_choices`.

    Raises: ApiError: 403, it wants to go before all others, and is no administrator.
    """
    priority = body.priority or 0
    if priority < 0 and not caller.may(Scope.ADMIN):
        # Strictly before everybody of 0, whatever the shares of keys are.
        raise ApiError(403, "a priority below 0 needs a key of scope admin", code="forbidden", param="priority")
    return {
        "principal": caller.principal,
        "adapter": target.ref.key if target.ref else None,
        "adapter_id": target.ref.adapter_id if target.ref else "",
        "on_cold": body.on_cold or OnCold.WAIT,
        "cache_salt": _salt(body.cache_salt, caller),
        "priority": priority,
        "timeout_s": body.timeout_s,
    }


def _salt(given: str | None, caller: Caller) -> str:
    """Who may share the pages of a prompt: those who have agreed on a salt, or else the requests of one key. No salt
    that somebody sends is that of a key."""
    if given:
        return f"salt:{given}"
    return "" if caller.principal == ANYBODY.principal else f"key:{caller.principal}"


def _speller(body: GenerationBody, services: Services) -> LogprobsFormatter | None:
    if body.top_shown is None and body.prompt_logprobs is None:
        return None
    return LogprobsFormatter(services.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))


def _echoes(prompts: Prompts, engine: "AsyncEngine") -> list[PromptEcho]:
    """Of prompts that are not too long by their length alone: those are for admission to refuse."""
    for prompt in prompts:
        if isinstance(prompt, str):
            check_could_fit([prompt], engine.tokenizer, engine.max_model_len, "prompt")
        elif len(prompt) > engine.max_model_len:
            why = f"the context holds {engine.max_model_len} tokens, but the prompt has {len(prompt)}"
            raise ContextLengthExceeded(why, param="prompt")
    return [PromptEcho.of(prompt, engine.tokenizer) for prompt in prompts]
