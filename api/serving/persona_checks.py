"""Check a persona's defaults before they are stored, as a request would use them; report all faults at once."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool

from adapter_store.composition import Component
from adapter_store.errors import AdapterNotFound, InvalidAlias, NotComposable, show
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef, AdapterSpec
from api.schemas.composition import PinnedAdapter
from api.schemas.openai import ChatBody
from api.schemas.personas import USER, Defaults, to_text
from api.serving.chat import ChatEngine, checked_budget, plan_chat, vocab_size_of
from api.serving.field_checks import INVALID, TURN, FieldChecks
from api.serving.model_list import digest_text
from api.serving.personas import PROMPT_FIELDS, StoredPersona, apply_to_body
from api.serving.services import Services
from api.serving.store_view import ScopedStore
from lorasrv.text.tokenizer import Tokenizer

CONTEXT_SHARE = 4
"""A persona's prompt may take the context divided by this."""
_DATE = re.compile(r"\b(?:19|20)\d\d-\d\d?-\d\d?\b|\b\d\d?\.\d\d?\.(?:19|20)\d\d\b")


@dataclass(frozen=True, slots=True)
class CheckedDefaults:
    """Hold defaults that can be stored: their text, the tokens of the prompt with a short turn, and warnings."""

    text: str
    prompt_tokens: int | None
    warnings: tuple[str, ...]

    def check_spec(self, spec: AdapterSpec) -> None:
        """Check that weights have rows for the tokens that the defaults name.

        Raises:
            AdapterInvalid: names every field that names others.
        """
        if spec.vocab_size:
            check_tokens(self.text, spec.vocab_size)

    def report(self) -> dict[str, Any]:
        """Return the fields for the upload's response."""
        return {"prompt_tokens": self.prompt_tokens, "warnings": list(self.warnings)}


def check_tokens(text: str, vocab_size: int) -> None:
    """Check that stored defaults name no other tokens than the first `vocab_size`.

    Raises:
        AdapterInvalid: names every field that does.
    """
    checks = FieldChecks(vocab_size)
    checks.sampling(Defaults.model_validate_json(text))
    checks.problems.raise_if_any()


async def check_defaults(
    given: Mapping[str, Any], services: Services, view: ScopedStore, own: Tokenizer | None = None
) -> CheckedDefaults:
    """Check defaults with the served base, and pin the versions of a sum.

    Args:
        own: tokenizer of the version's weights; None: the base's.

    Raises:
        AdapterInvalid: names every fault found.
    """
    check = _Check(services.engine, own)
    defaults = await services.in_thread(dict(given), partial(check.fields, given), view.caller)
    if defaults.adapters:
        components = await run_in_threadpool(check.parts, defaults.adapters, view)
        with check.faults_of("adapters"):
            await services.personas.check_stored(components, view)
        given = {**given, "adapters": [_pinned(component) for component in components]}
    for grammar in check.grammars:
        with check.faults_of(grammar.param):
            await services.engine.grammars.compile(grammar, view.caller.principal, own)
    check.problems.raise_if_any()
    return CheckedDefaults(to_text(given), check.prompt_tokens, tuple(check.warnings))


def _pinned(component: Component) -> dict[str, Any]:
    ref = component.ref
    return {
        "id": f"{ref.adapter_id}@{ref.version}",
        "weight": component.weight,
        "digest": digest_text(ref.key),
    }


class _Check(FieldChecks):
    """Collect the faults of one persona's defaults that a request to this engine would meet."""

    def __init__(self, engine: ChatEngine, own: Tokenizer | None) -> None:
        super().__init__(vocab_size_of(engine, own))
        self._engine, self._own = engine, own
        self.warnings: list[str] = []
        self.prompt_tokens: int | None = None

    def fields(self, given: Mapping[str, Any]) -> Defaults:
        """Check everything except the compilation of grammars and the sum of adapters; return the valid fields."""
        defaults = super().fields(given)
        self._control_tokens(defaults)
        if defaults.system_prompt is not None:
            self._early(defaults.system_prompt.text)
        self._prompt(defaults)
        self._room(defaults)
        with self.faults_of("thinking_token_budget"):
            checked_budget(defaults, self._engine.chat_template)
        return defaults

    def parts(self, adapters: Sequence[PinnedAdapter], view: ScopedStore) -> list[Component]:
        """Return the versions of a sum that exist, and check that they can be summed. `Personas.check_stored` reports
        versions without weights."""
        found = []
        for number, each in enumerate(adapters):
            try:
                ref = view.resolve_one(each.id)
            except (AdapterNotFound, InvalidAlias) as error:
                self.problems.add(INVALID, f"adapters[{number}].id", str(error))
                continue
            if ref.key is not None and each.digest not in (None, digest_text(ref.key)):
                why = f"{ref.adapter_id}@{ref.version} is not {each.digest}; leave digest out"
                self.problems.add(INVALID, f"adapters[{number}]", why)
            found.append(Component(ref, each.weight))
        if not len(self.problems) and all(component.ref.key for component in found):
            composition = view.compose(found, is_stored=True)
            if composition.key is None:
                self.problems.add(INVALID, "adapters", "the sum is nothing: the base would answer")
            try:
                view.check_composable(composition)
            except NotComposable as error:
                named = {component.ref.key: component.ref for component in found}.get(AdapterKey(error.key or ""))
                name = "the sum" if named is None else f"{named.adapter_id}@{named.version}"
                self.problems.add(INVALID, "adapters", f"{name}: {error}")
        return found

    def _control_tokens(self, defaults: Defaults) -> None:
        template, tokenizer = self._engine.chat_template, self._own or self._engine.tokenizer
        for place, text in (*defaults.texts(), ("name", defaults.name or "")):
            if template is not None and (tokens := template.control_tokens(text, tokenizer)):
                self.problems.add(INVALID, place, f"{show(tokens[0])} is a special token, not a text")

    def _early(self, text: str) -> None:
        """Warn of text that varies early in the prompt: only the part before it is the same for all requests."""
        half = len(text) // 2
        if 0 <= text.find(USER) < half:
            self.warnings.append(f"{USER} stands early in system: what follows is computed for each user again")
        if (date := _DATE.search(text)) is not None and date.start() < half:
            self.warnings.append(f"the date {date[0]} stands early in system: changing it changes all that follows")

    def _prompt(self, defaults: Defaults) -> None:
        """Render the prompt as a request would."""
        names = [*PROMPT_FIELDS]
        # A schema may be combined with tools if the template's tool calls can be told from it.
        names += ["response_format"] if any(grammar.schema is not None for grammar in self.grammars) else []
        fields = {name: getattr(defaults, name) for name in names}
        stored = StoredPersona(AdapterRef(AdapterId("persona"), 0, None), "", Defaults(**fields), "")
        if not stored.has_prompt:
            return
        if self._engine.chat_template is None:
            self.problems.add(INVALID, "system", "this base has no chat template: only sampling fields and stops apply")
            return
        asked = ChatBody.model_validate({"messages": [TURN]})
        with self.faults_of("system"):
            body, _ = apply_to_body(asked, stored, may_read=True)
            plan = plan_chat(body, self._engine, own_tokenizer=self._own)
            self.prompt_tokens = len(plan.prompt)
            self.grammars += [] if plan.grammar is None else [plan.grammar]
            most = self._engine.max_model_len // CONTEXT_SHARE
            if self.prompt_tokens > most:
                self.problems.add(
                    INVALID,
                    "system",
                    f"the prompt has {self.prompt_tokens} tokens with one short turn; {most}, a quarter of the "
                    "context, are the most",
                )

    def _room(self, defaults: Defaults) -> None:
        """Check that the context has room for the prompt, of at least one token, and the answer."""
        context, prompt = self._engine.max_model_len, self.prompt_tokens or 1
        for name in ("max_tokens", "min_tokens"):
            if (getattr(defaults, name) or 0) > context - prompt:
                why = f"is more than the context of {context} tokens has room for: the shortest prompt has {prompt}"
                self.problems.add(INVALID, name, why)
