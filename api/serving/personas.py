"""Apply a persona's defaults to requests. The request takes precedence, then the persona, then the server.

A conversation gets all defaults, a plain continuation only sampling and stops. Stops are united and biases merged by
token; any other field of the request replaces the persona's. Defaults that contradict the request are left out.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from cachetools import LRUCache
from starlette.concurrency import run_in_threadpool

from adapter_store.composition import Component
from adapter_store.errors import AdapterNotFound, StoreUnusable
from adapter_store.spec import AdapterRef
from adapter_store.store import AdapterStore
from api.asgi.json_lines import Json
from api.errors import ApiError
from api.schemas.composition import PinnedAdapter
from api.schemas.openai import LIMIT_NAMES, ChatBody, GenerationBody, SamplingFields, bias_of_tokens
from api.schemas.personas import USER, Defaults, user_name
from api.schemas.request_fields import RequestFields
from api.schemas.tgi import Parameters
from api.schemas.tools import Message, ReasoningFields
from api.serving.model_list import digest_text
from api.serving.store_view import ScopedStore
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.sampling_params import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_STOP_STRINGS, SamplingParams
from lorasrv.text.reasoning import REASONING_SWITCHES

MAX_CACHED = 256
_SAMPLING = tuple(SamplingFields.model_fields)
_UNITED = ("stop", "stop_token_ids", "logit_bias", "bad_words")
_WITH_BEAMS = frozenset({"max_tokens", "stop_token_ids", "ignore_eos"})
_AS_THEY_ARE = ("chat_template_kwargs", "speculation", "context_overflow", *ReasoningFields.model_fields)
_WITHOUT_GRAMMAR = ("min_tokens", "ignore_eos", "allowed_token_ids")
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
# Fields, besides the texts, that a chat template may render into the prompt.
_IN_TEMPLATE = ("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
_OF_EFFORT = (*REASONING_SWITCHES, "reasoning_effort")
FORM_FIELDS = (*TOOL_FIELDS, "response_format")
"""Fields that determine the form of the answer."""
PROMPT_FIELDS = ("name", "system", "examples", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls")
"""Fields that the prompt depends on."""
# TGI's names, where they differ.
_TGI_NAMES = {"max_tokens": "max_new_tokens", "ignore_eos": "ignore_eos_token"}
_TGI_FILTERS = ("top_p", "top_k", "min_p", "typical_p")
_TGI_SAMPLING = (
    *("max_tokens", "ignore_eos", "seed", "watermark"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


@dataclass(frozen=True)
class StoredPersona:
    """Hold the defaults of one version, parsed and as text, and its owner."""

    ref: AdapterRef
    text: str
    defaults: Defaults
    owner: str

    @property
    def has_prompt(self) -> bool:
        """Return whether the persona adds anything to prompts."""
        return any(getattr(self.defaults, name) for name in PROMPT_FIELDS if name != "name")

    @cached_property
    def names_user(self) -> bool:
        """Return whether the persona's prompt depends on the user's name."""
        return any(USER in text for place, text in self.defaults.texts() if not place.startswith("greetings"))

    def shown(self, *, may_read: bool) -> Json:
        """Return what callers see: name, greetings, digest and names of the fields, and all defaults if `may_read`."""
        defaults, given = self.defaults, json.loads(self.text)
        adapter_id = self.ref.adapter_id
        return {
            "digest": f"sha256:{self.ref.persona}",
            "name": defaults.name or adapter_id,
            "greetings": [defaults.filled(text, adapter_id, None) for text in defaults.greetings or ()],
            "fields": list(given),
            "defaults": given if may_read else None,
        }


@dataclass(frozen=True, slots=True)
class AppliedPersona:
    """Describe which parts of a persona were applied to a request.

    - `prompt_key` identifies the persona's part of the prompt (texts, tools, template variables) and what precedes it;
      "" if the persona has no part of the prompt.
    - `is_hidden`: the caller may not read that part.
    - `messages` are the whole conversation, empty if the persona has no texts in it. The first `num_fixed` stay when
      turns are dropped; `num_added` of them are the persona's.
    - `is_whole`: the prompt begins with the persona's complete part, and the client contributed only the user's name.
    - `token_fields` and `template_kwargs` are fields that TGI's body does not have.
    """

    ref: AdapterRef
    applied: tuple[str, ...] = ()
    prompt_key: str = ""
    is_hidden: bool = False
    messages: tuple[Message, ...] = ()
    num_fixed: int = 0
    num_added: int = 0
    is_whole: bool = False
    token_fields: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def usage(self) -> Json:
        """Return the content of `usage.lorasrv.persona`."""
        return {
            "id": self.ref.adapter_id,
            "version": self.ref.version,
            "digest": f"sha256:{self.ref.persona}",
            "applied": list(self.applied),
        }

    @contextmanager
    def hiding_errors(self) -> Iterator[None]:
        """Replace the chat template's error messages if the caller may not read the whole conversation.

        Raises:
            InvalidRequest: instead of the template's error, which could quote the conversation.
        """
        try:
            yield
        except ContextLengthExceeded:
            raise
        except InvalidRequest:
            if not self.is_hidden:
                raise
            why = "{param}: the chat template refuses them after this persona's prompt"
            raise InvalidRequest(why, param="messages") from None

    def with_tokens(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling with `token_fields`, which TGI's body does not have."""
        given = dict(self.token_fields)
        if sampling.max_tokens is not None and given.get("min_tokens", 0) > sampling.max_tokens:
            del given["min_tokens"]
        return replace(sampling, **given) if given else sampling


class Personas:
    """Read the defaults of versions, and cache the last ones used. Thread-safe."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Keyed by the whole reference, because a restored registry or an imported archive may reuse version numbers.
        self._known: LRUCache[AdapterRef, StoredPersona] = LRUCache(MAX_CACHED)

    async def find(self, ref: AdapterRef) -> StoredPersona:
        """Return the defaults of a version, which must have some.

        Raises:
            AdapterNotFound: the version was deleted.
            StoreUnusable: this version of lorasrv cannot read them.
        """
        with self._lock:
            known = self._known.get(ref)
        return known if known is not None else await run_in_threadpool(self._read, ref)

    async def apply(
        self, fields: RequestFields, ref: AdapterRef, view: ScopedStore, turn: str | None = None
    ) -> tuple[RequestFields, AppliedPersona]:
        """Return a request's fields with the defaults of the version that it named, and what was applied.

        Args:
            turn: the only turn of a conversation in TGI's protocol; None for a plain continuation.

        Raises:
            AdapterNotFound: the version was deleted.
            InvalidRequest: a field of the request is not allowed with this persona.
        """
        stored = await self.find(ref)
        may_read = view.may_read_defaults(stored.owner)
        if fields.use_defaults is False:
            if stored.defaults.is_locked and not may_read:
                raise InvalidRequest("this persona's defaults are locked; leave {param} out", param="use_defaults")
            return fields, AppliedPersona(ref)
        if fields.kv_policy is not None and stored.defaults.is_locked and not may_read:
            raise InvalidRequest("{param} could drop this persona's locked prompt; leave it out", param="kv_policy")
        if isinstance(fields, Parameters):
            return _apply_to_parameters(fields, stored, turn, may_read)
        assert isinstance(fields, GenerationBody)
        return apply_to_body(fields, stored, may_read)

    async def check_parts(self, components: Sequence[Component], view: ScopedStore) -> None:
        """Check that no part of a sum is itself a sum, and that the sum does not bypass the protection of prompts.

        A locked prompt must be applied with its weights, so its adapter must come first. A hidden prompt may only be
        combined with adapters of the prompt's owner, because other weights could reveal it.

        Raises:
            AdapterNotFound: a version was deleted.
            InvalidRequest: one of the adapters does not satisfy this.
        """
        if not components:
            return
        found = [await self._adapter(component.ref) for component in components]
        applied, first = found[0], components[0].ref
        is_hidden = applied is not None and applied.has_prompt and not view.may_read_defaults(applied.owner)
        for component, stored in list(zip(components, found, strict=True))[1:]:
            ref = component.ref
            if stored is not None and stored.defaults.is_locked and not view.may_read_defaults(stored.owner):
                why = f"{ref.adapter_id} has a locked prompt, so it can only be named first, which applies it"
                raise InvalidRequest(why, param="adapters")
            if applied is not None and is_hidden and await self._owner(ref) != applied.owner:
                why = f"{first.adapter_id} has a prompt that is not yours, so only its owner's adapters can be added"
                raise InvalidRequest(why, param="adapters")

    async def check_stored(self, components: Sequence[Component], view: ScopedStore) -> None:
        """Check that a sum may be stored: all its adapters have weights, and the caller may read all their defaults.

        Otherwise the sum would give an adapter's weights other defaults than its owner wants.

        Raises:
            AdapterNotFound, InvalidRequest: as `check_parts`.
        """
        for component in components:
            ref, stored = component.ref, await self._adapter(component.ref)
            if ref.key is None:
                raise InvalidRequest(f"{ref.adapter_id}@{ref.version} has no weights", param="adapters")
            if stored is not None and not view.may_read_defaults(stored.owner):
                why = f"{ref.adapter_id}@{ref.version} has defaults, so only its owner stores sums of it"
                raise InvalidRequest(why, param="adapters")

    async def _adapter(self, ref: AdapterRef) -> StoredPersona | None:
        """Return the defaults of a version that will be part of a sum; None if it has none.

        Raises:
            InvalidRequest: the version is itself a sum.
        """
        stored = await self.find(ref) if ref.persona else None
        if stored is not None and stored.defaults.adapters:
            why = f"{ref.adapter_id}@{ref.version} is a sum itself; name its adapters instead"
            raise InvalidRequest(why, param="adapters")
        return stored

    async def _owner(self, ref: AdapterRef) -> str:
        return await run_in_threadpool(self._store.version_history.owner, ref)

    async def parts(self, ref: AdapterRef) -> tuple[Component, ...]:
        """Return the versions that a stored sum consists of; () if the version is not a stored sum.

        Raises:
            ApiError: 404, one of them was deleted.
        """
        pinned = (await self.find(ref)).defaults.adapters if ref.persona else None
        return tuple(Component(self._part(each, ref), each.weight) for each in pinned or ())

    def num_deleted_parts(self, stored: StoredPersona) -> int:
        """Return how many of the versions that this sum consists of were deleted."""
        return sum(self._found(each) is None for each in stored.defaults.adapters or ())

    def _part(self, pinned: PinnedAdapter, whole: AdapterRef) -> AdapterRef:
        part = self._found(pinned)
        if part is None:
            raise part_is_gone(f"{whole.adapter_id}@{whole.version}")
        return part

    def _found(self, pinned: PinnedAdapter) -> AdapterRef | None:
        try:
            part = self._store.resolve_one(pinned.id)
        except AdapterNotFound:
            return None
        return part if digest_text(part.key) == pinned.digest else None

    def _read(self, ref: AdapterRef) -> StoredPersona:
        history = self._store.version_history
        text = history.defaults(ref)
        try:
            defaults = Defaults.from_text(text)
        except ValueError as error:
            name = f"{ref.adapter_id}@{ref.version}"
            raise StoreUnusable(f"another version of lorasrv has stored the defaults of {name}: {error}") from None
        stored = StoredPersona(ref, text, defaults, history.owner(ref))
        with self._lock:
            self._known[ref] = stored
        return stored


def part_is_gone(name: str) -> ApiError:
    """Build the 404 response for a stored sum with a deleted part."""
    why = f"{name} is a sum of adapters, and one of them was deleted; compose it anew"
    return ApiError(404, why, code="adapter_deleted", param="model")


def apply_to_body(body: Any, stored: StoredPersona, may_read: bool) -> tuple[Any, AppliedPersona]:
    is_chat = isinstance(body, ChatBody)
    defaults, form = _without_contradictions(body, stored.defaults, _form(body, stored.defaults) if is_chat else {})
    update = _sampling(body, defaults) | form
    applied = AppliedPersona(stored.ref)
    if is_chat:
        if defaults.is_locked:
            _check_writes_no_text(body)
        if body.reasoning_effort is not None:
            defaults = _without_effort(defaults)
        if body.use_beam_search:
            defaults = defaults.model_copy(update={"thinking_token_budget": None})
        for name in _AS_THEY_ARE:
            if getattr(body, name) is None and getattr(defaults, name) is not None:
                update[name] = getattr(defaults, name)
        shown = body.model_copy(update=update)
        variables = [shown.tools if shown.uses_tools else None, shown.chat_template_kwargs]
        variables += [] if shown.reasoning_effort is None else [shown.reasoning_effort]
        has_own = any(name in update for name in _IN_TEMPLATE)
        applied = _with_persona(stored, body.messages, body.user, variables, has_own, may_read)
        says_none = all(getattr(body, name) is None for name in _IN_TEMPLATE)
        applied = replace(applied, is_whole=applied.is_whole and says_none)
        if shown.continue_final_message and defaults.examples and all(map(_is_system, body.messages)):
            why = "{param} would continue the persona's example; end with a message of another role than system"
            raise InvalidRequest(why, param="continue_final_message")
        if applied.is_hidden and body.prompt_logprobs is not None:
            raise InvalidRequest("{param} would show the persona's hidden prompt", param="prompt_logprobs")
        if applied.is_hidden and body.return_token_ids:
            raise InvalidRequest("{param} would show the persona's hidden prompt", param="return_token_ids")
        if applied.prompt_key and body.truncate_prompt_tokens is not None:
            why = "{param} would cut off the persona's prompt; leave it out"
            raise InvalidRequest(why, param="truncate_prompt_tokens")
    merged = body.model_copy(update=update | ({"messages": list(applied.messages)} if applied.messages else {}))
    _keep_lengths_apart(body, merged, update)
    return merged, replace(applied, applied=(*applied.applied, *update), messages=())


def _apply_to_parameters(
    parameters: Parameters, stored: StoredPersona, turn: str | None, may_read: bool
) -> tuple[Any, AppliedPersona]:
    applied, variables = AppliedPersona(stored.ref), dict[str, Any]()
    form = {} if turn is None else _tgi_form(parameters, stored.defaults)
    defaults, form = _without_contradictions(parameters, stored.defaults, form)
    update = _tgi_sampling(parameters, defaults) | form
    if turn is not None:
        variables = defaults.chat_template_kwargs or {}
        applied = _with_persona(stored, [message("user", turn)], None, [variables], bool(variables), may_read)
        _check_shows_nothing(parameters, applied)
    tokens: Json = {
        "stop_token_ids": tuple(defaults.stop_token_ids or ()),
        "logit_bias": bias_of_tokens(defaults.logit_bias),
        "bad_words": tuple(defaults.bad_words or ()),
        "no_repeat_ngram_size": defaults.no_repeat_ngram_size,
        "allowed_token_ids": tuple(defaults.allowed_token_ids or ()),
        "min_tokens": defaults.min_tokens,
    }
    # FSD is deterministic, so a request with a temperature or with sampling does not get it.
    if parameters.temperature is None and not parameters.model_copy(update=update).is_sampled:
        tokens |= {"fsd_alpha": defaults.fsd_alpha, "fsd_ngram": defaults.fsd_ngram}
    given = {name: value for name, value in tokens.items() if value}
    names = [name for name in (*_SAMPLING, "response_format") if _TGI_NAMES.get(name, name) in update] + list(given)
    names += ["chat_template_kwargs"] if variables else []
    applied = replace(applied, applied=(*applied.applied, *names), token_fields=given, template_kwargs=variables)
    return parameters.model_copy(update=update), applied


def _check_shows_nothing(parameters: Parameters, applied: AppliedPersona) -> None:
    if applied.is_hidden and parameters.decoder_input_details:
        raise InvalidRequest("{param} would show the persona's hidden prompt", param="decoder_input_details")
    if applied.prompt_key and parameters.truncate is not None:
        raise InvalidRequest("{param} would cut off the persona's prompt; leave it out", param="truncate")


def _sampling(body: GenerationBody, defaults: Defaults) -> Json:
    """Return the sampling fields that the request gets, united or merged with its own if possible."""
    own = {name: value for name in _SAMPLING if (value := getattr(defaults, name)) is not None}
    said = {name for name in _SAMPLING if getattr(body, name) is not None}
    if any(getattr(body, name) is not None for name in LIMIT_NAMES):
        said.add("max_tokens")
    if body.temperature is not None or body.fsd_alpha is not None:
        # FSD is deterministic, so a temperature and FSD exclude each other.
        said |= {"temperature", "fsd_alpha", "fsd_ngram"}
    if body.use_beam_search:
        own = {name: value for name, value in own.items() if name in _WITH_BEAMS}
    update = {name: value for name, value in own.items() if name not in said}
    for name in _UNITED:
        if name in own and name in said:
            update[name] = _united(name, getattr(body, name), own[name])
    return update


def _united(name: str, given: Any, own: Any) -> Any:
    if name == "logit_bias":
        return _bounded(name, {**own, **given}, MAX_BIASED_TOKENS)
    both = [*_listed(given), *_listed(own)]
    most = {"stop": MAX_STOP_STRINGS, "bad_words": MAX_BAD_WORDS}
    return _bounded(name, list(dict.fromkeys(both)), most.get(name))


def _bounded(name: str, both: Any, most: int | None) -> Any:
    if most is not None and len(both) > most:
        raise InvalidRequest(
            f"{name}: the request and the persona have {len(both)} together, {most} at most", param=name
        )
    return both


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str) else value


def _check_writes_no_text(body: ChatBody) -> None:
    """Refuse template variables that a template could render into a locked system prompt as a text of the client.

    Raises:
        InvalidRequest: one of them is not true, false or a number.
    """
    for name, value in (body.chat_template_kwargs or {}).items():
        if not isinstance(value, bool | int | float):
            why = f"{{param}}: this persona's system prompt is locked, so {name[:64]!r} must be true, false or a number"
            raise InvalidRequest(why, param="chat_template_kwargs")


def _keep_lengths_apart(body: GenerationBody, merged: GenerationBody, update: Json) -> None:
    """Leave out a default minimum or maximum length that contradicts the request's other length."""
    least, most = merged.min_tokens, merged.wanted_tokens()
    if least is None or most is None or least <= most:
        return
    name = "max_tokens" if "max_tokens" in update and body.min_tokens is not None else "min_tokens"
    if name in update:
        setattr(merged, name, getattr(body, name))
        del update[name]


def _without_contradictions(
    fields: GenerationBody | Parameters, defaults: Defaults, form: Json
) -> tuple[Defaults, Json]:
    """Leave out a default grammar, or defaults that cannot be combined with a grammar, if the request contradicts them.

    Args:
        form: defaults that determine the form of the answer, possibly by a grammar.
    """
    if not fields.model_copy(update=form).is_constrained:
        return defaults, form
    if fields.is_constrained or not fields.excludes_grammar:
        return defaults.model_copy(update=dict.fromkeys(_WITHOUT_GRAMMAR)), form
    form = {name: value for name, value in form.items() if name not in ("response_format", "tool_choice")}
    # Offered tools need no grammar, unless one of them is strict.
    return defaults, {} if fields.model_copy(update=form).is_constrained else form


def _without_effort(defaults: Defaults) -> Defaults:
    """Leave out template variables that may contradict the request's `reasoning_effort`."""
    given = defaults.chat_template_kwargs or {}
    kept = {name: value for name, value in given.items() if name not in _OF_EFFORT}
    return defaults.model_copy(update={"chat_template_kwargs": kept or None})


def _form(body: ChatBody, defaults: Defaults) -> Json:
    """Return the defaults that determine the form of the answer. A grammar in the request excludes them."""
    if body.use_beam_search or body.has_grammar:
        return {}
    names = [name for name in TOOL_FIELDS if getattr(body, name) is None] if body.tools is None else []
    names += [] if body.tools or body.response_format is not None else ["response_format"]
    return {name: value for name in names if (value := getattr(defaults, name)) is not None}


def _tgi_form(parameters: Parameters, defaults: Defaults) -> Json:
    is_said = parameters.grammar is not None or parameters.response_format is not None
    return {} if is_said or defaults.response_format is None else {"response_format": defaults.response_format}


def _with_persona(
    stored: StoredPersona,
    given: Sequence[Message],
    user: str | None,
    variables: Sequence[Any],
    has_own: bool,
    may_read: bool,
) -> AppliedPersona:
    """Return the conversation with the persona's texts before it.

    Args:
        variables: variables of the template, apart from the conversation.
        has_own: whether some of these variables come from the persona.

    Raises:
        InvalidRequest: the client's system message is not allowed, or `user` is not a name.
    """
    defaults, ref = stored.defaults, stored.ref
    user = user_name(user) if stored.names_user else ""
    system, own_system = defaults.system_prompt, list(filter(_is_system, given))
    if own_system and defaults.is_locked:
        why = "{param}: this persona's system prompt is locked; send no system message"
        raise InvalidRequest(why, param=f"messages[{given.index(own_system[0])}]")
    if own_system and system is not None and system.mode == "default":
        system = None
    leading = list(takewhile(_is_system, given))
    fixed, rest, applied = list(leading), given[len(leading) :], []
    if system is not None:
        texts = [defaults.filled(system.text, ref.adapter_id, user), *(m.plain()["content"] for m in leading)]
        # A single system message, because many templates do not accept a second one.
        fixed = [message("system", "\n\n".join(texts))]
        applied.append("system")
    for dialogue in defaults.examples or ():
        fixed += [message(turn.role, defaults.filled(turn.content, ref.adapter_id, user)) for turn in dialogue]
    if defaults.examples:
        applied.append("examples")
    if not applied and not has_own:
        return AppliedPersona(ref)
    before = [] if system is not None else [m.plain()["content"] for m in own_system]
    facts = json.dumps([ref.persona, applied, user, before, *variables], sort_keys=True)
    key = hashlib.sha256(facts.encode()).hexdigest()
    if not applied:
        return AppliedPersona(ref, (), key, not may_read, is_whole=not own_system)
    messages = (*fixed, *rest)
    return AppliedPersona(
        ref,
        tuple(applied),
        key,
        not may_read,
        messages,
        len(fixed),
        len(messages) - len(given),
        is_whole=not own_system,
    )


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def message(role: str, content: str) -> Message:
    """Build a message of a conversation."""
    return Message.model_validate({"role": role, "content": content})


def _tgi_sampling(parameters: Parameters, defaults: Defaults) -> Json:
    """Return the sampling fields that the request gets, under TGI's names."""
    given = {_TGI_NAMES.get(name, name): getattr(defaults, name) for name in _TGI_SAMPLING}
    if parameters.do_sample is not False:
        given |= {name: getattr(defaults, name) for name in _TGI_FILTERS}
        given["top_k"] = None if defaults.top_k in (0, -1) else defaults.top_k
        if defaults.temperature or not parameters.is_sampled:
            given["temperature"] = defaults.temperature
    update = {name: value for name, value in given.items() if value is not None and getattr(parameters, name) is None}
    if update.get("temperature") and parameters.do_sample is None:
        update["do_sample"] = True
    if defaults.stop is not None:
        own = [*(parameters.stop or ()), *(parameters.stop_sequences or ())]
        update["stop"] = _united("stop", own, defaults.stop)
    return update
