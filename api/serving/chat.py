"""Convert a chat body to an engine request: prompt, grammar, and the format of reasoning and tool calls."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from api.schemas.openai import ChatBody
from api.schemas.tools import Message, ReasoningFields
from api.serving.openai_responses import ChatFormat, ParsedChatFormat
from api.serving.overflow import MAX_CONTEXTS, fitted, room_for_prompt
from api.serving.personas import AppliedPersona
from lorasrv.errors import InvalidRequest
from lorasrv.models.spec import ModelSpec
from lorasrv.sampling_params import TextOptions
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.reasoning import REASONING_SWITCHES, Markers, PromptEnd, ReasoningFormat, detect_markers
from lorasrv.text.reasoning_budget import ReasoningBudget
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.tokenizer import Tokenizer, check_could_fit
from lorasrv.text.tool_parsers.base import Tool
from lorasrv.text.tool_parsers.formats import ToolFormat

if TYPE_CHECKING:
    from lorasrv.text.chat_template import ChatTemplate


class ChatEngine(Protocol):
    """Declare what prompts of chats are made with; `AsyncEngine` implements it."""

    spec: ModelSpec
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: "ChatTemplate | None"


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """Hold the engine's view of a chat request."""

    prompt: list[int]
    grammar: Grammar | None
    protocol_format: ChatFormat
    # The answer's text, with the special tokens that its readers must see.
    text: TextOptions
    # None: no limit, or the answer has no reasoning.
    budget: ReasoningBudget | None = None
    # None: none may be dropped.
    dropped_turns: int | None = None


def plan_chat(
    body: ChatBody,
    engine: ChatEngine,
    persona: AppliedPersona | None = None,
    own_tokenizer: Tokenizer | None = None,
) -> ChatPlan:
    """Convert the body. Call in a thread: long conversations and large schemas take milliseconds.

    Args:
        persona: what the body got of a persona's defaults.
        own_tokenizer: that of an adapter with tokens of its own; None: the base's.

    Raises:
        InvalidRequest: a field is malformed, or the base's template does not support it.
    """
    template, tokenizer = engine.chat_template, own_tokenizer or engine.tokenizer
    if template is None:
        raise InvalidRequest(
            "this base has no chat template; use /v1/completions (lorasrv generate --raw)", param="messages"
        )
    grammar, tools = body.grammar(), body.offered_tools()
    variables = _variables(body, template)
    check_tools_supported(body.messages, template, 0 if persona is None else persona.num_added)
    if body.uses_tools:
        variables["tools"] = body.tools
    prompt, dropped = _prompt(body, engine, template, tokenizer, variables, persona)
    markers = detect_markers(template.tool_source if body.uses_tools else template.source)
    num_tokens = checked_budget(body, template)
    is_open = None if markers is None else _is_open(body, markers, tokenizer, prompt)
    form = _format_of(template, "tools") if body.uses_tools else None
    is_parallel = body.allows_parallel_calls and form is not None and form.takes_several
    shown = frozenset[int]() if markers is None else markers.shown(tokenizer)
    if form is not None:
        grammar = _grammar_of_calls(body, grammar, form, tools, tokenizer, parallel=is_parallel)
        shown |= form.shown(tokenizer)
    is_separate = body.separate_reasoning is not False
    if grammar is not None and markers is not None and is_open is not None:
        if is_separate:
            grammar = markers.in_front_of(grammar, tokenizer, is_open=is_open)
        else:
            # Without a part of its own for reasoning, the whole content is what the grammar allows.
            grammar = markers.with_markers(grammar, tokenizer)
    begins_freely = grammar is None or grammar.begins_freely
    text = body.text_options(shown, strip_start=begins_freely and not body.continue_final_message)
    reasoning = None
    if markers is not None and is_open is not None and is_separate:
        is_shown, detokenizer = body.include_reasoning is not False, partial(Detokenizer, tokenizer, text)
        reasoning = ReasoningFormat(markers, is_open, is_shown, detokenizer)
    budget = None
    # Without a part of its own, there is reasoning only if the text is free.
    if num_tokens is not None and markers is not None and is_open is not None and (is_separate or begins_freely):
        budget = ReasoningBudget(markers, is_open, num_tokens, tokenizer, text)
    if form is None and reasoning is None:
        return ChatPlan(prompt, grammar, ChatFormat(), text, budget, dropped)
    names = frozenset(tool.name for tool in tools)
    protocol_format = ParsedChatFormat(form, names, parallel=is_parallel, reasoning=reasoning)
    return ChatPlan(prompt, grammar, protocol_format, text, budget, dropped)


def _variables(body: ChatBody, template: "ChatTemplate") -> dict[str, Any]:
    """Return the template variables that the body asks for.

    Raises:
        InvalidRequest: the template does not take one of them, or `reasoning_effort` says what it cannot do.
    """
    given, effort = template.checked_variables(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is None:
        return given
    said: dict[str, Any] = dict.fromkeys(REASONING_SWITCHES & template.variables, False) if effort == "none" else {}
    if "reasoning_effort" in template.variables:
        said["reasoning_effort"] = effort
    elif effort != "none":
        why = "{param}: this base's chat template has no effort levels; leave it out, or send none to stop reasoning"
        raise InvalidRequest(why, param="reasoning_effort")
    elif not said and detect_markers(template.source) is not None:
        raise InvalidRequest("{param}: this base cannot answer without reasoning", param="reasoning_effort")
    if any(given.get(name, value) != value for name, value in said.items()):
        why = "{param} and chat_template_kwargs contradict each other; send one"
        raise InvalidRequest(why, param="reasoning_effort")
    return {**given, **said}


def _is_open(body: ChatBody, markers: Markers, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool | None:
    """Return whether the prompt has begun the reasoning; None: the answer follows its end."""
    if body.continue_final_message:
        end = markers.end_of_message(body.messages[-1].plain()["content"])
    else:
        end = markers.end_of_prompt(prompt, tokenizer)
    return None if end is PromptEnd.CLOSED else end is PromptEnd.OPEN


def checked_budget(fields: ReasoningFields, template: "ChatTemplate | None") -> int | None:
    """Return the most tokens of reasoning; None: no limit.

    Raises:
        InvalidRequest: the base does not reason, with tools or without.
    """
    if fields.thinking_token_budget in (None, -1):
        return None
    if template is None or detect_markers(template.source + template.tool_source) is None:
        why = "{param}: this base does not reason, by its chat template; leave it out"
        raise InvalidRequest(why, param="thinking_token_budget")
    return fields.thinking_token_budget


def _grammar_of_calls(
    body: ChatBody,
    grammar: Grammar | None,
    form: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
) -> Grammar | None:
    """Return the grammar of an answer with tools, given that of one without."""
    if grammar is not None:
        check_beside_tools(grammar, form)
    if body.forces_call:
        return form.grammar(tools, parallel, tokenizer)
    if grammar is not None:
        return form.grammar_beside(grammar, tools, parallel, tokenizer)
    return form.unforced_grammar(tools, tokenizer) if any(tool.is_strict for tool in tools) else None


def vocab_size_of(engine: ChatEngine, own: Tokenizer | None) -> int:
    """Return above which number there are no tokens; the engine knows whether those below have rows."""
    return max(engine.spec.vocab_size, 0 if own is None else own.vocab_size)


def check_beside_tools(grammar: Grammar, form: ToolFormat) -> None:
    """Check that an answer by a grammar can be told from calls of tools.

    Raises:
        InvalidRequest: it is not JSON, or calls are JSON without a marker.
    """
    if grammar.schema is None:
        raise InvalidRequest("{param} and tools exclude each other, unless it is JSON; send one", param=grammar.param)
    if not form.marks_calls:
        raise InvalidRequest(
            "{param} and tools exclude each other with this base's chat template: its calls are JSON, too",
            param=grammar.param,
        )


def check_tools_supported(messages: Sequence[Message], template: "ChatTemplate", num_added: int = 0) -> None:
    """Check that the template supports tools if messages need it.

    Args:
        num_added: how many messages, none about tools, stand before those that the client numbers from 0.

    Raises:
        InvalidRequest: a message is about tools, which the template would leave out.
    """
    for number, message in enumerate(messages, -num_added):
        if message.is_about_tools:
            _format_of(template, f"messages[{number}].{'role' if message.role == 'tool' else 'tool_calls'}")


def _prompt(
    body: ChatBody,
    engine: ChatEngine,
    template: "ChatTemplate",
    tokenizer: Tokenizer,
    variables: dict[str, Any],
    persona: AppliedPersona | None,
) -> tuple[list[int], int | None]:
    """Return the prompt's tokens, and how many turns were dropped for it; None if none may be. The persona's messages
    stay, and the system messages that begin a conversation.
    """
    if "tools" in variables:
        _format_of(template, "tools")
    messages = [message.plain() for message in body.messages]
    may_drop = body.context_overflow == "drop_oldest"
    num_contexts = MAX_CONTEXTS if may_drop or body.truncate_prompt_tokens is not None else 1

    # Check the template's output, as it may leave out part of the messages.
    def check(texts: Sequence[str]) -> None:
        check_could_fit(texts, tokenizer, engine.max_model_len * num_contexts)

    encode = partial(template.encode, tokenizer=tokenizer, check=check)
    whole = partial(encode, **variables, **body.prompt_end(body.messages[-1]))
    first = next((number for number, message in enumerate(messages) if message["role"] != "system"), 0)
    room = room_for_prompt(engine.max_model_len, body.wanted_tokens())
    # Turns are measured with the template of conversations with tools, which alone may write calls.
    bare = partial(encode, **variables | ({"tools": []} if "tools" in variables else {}))
    num_fixed = max(first, 0 if persona is None else persona.num_fixed)
    # What the template says may quote the conversation; what is wrong with the body was told before.
    with nullcontext() if persona is None else persona.hiding_errors():
        if not may_drop:
            return whole(messages), None
        return fitted(messages, num_fixed, room, engine.max_model_len, whole, bare)


def _format_of(template: "ChatTemplate", param: str) -> ToolFormat:
    if "tools" not in template.variables:
        raise InvalidRequest("{param}: this base's chat template does not support tools; leave them out", param=param)
    if template.tool_format is None:
        raise InvalidRequest(
            "{param}: this base's chat template writes tool calls in no format that this server can parse",
            param=param,
        )
    return template.tool_format
