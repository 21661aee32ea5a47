"""Check a persona's defaults as far as possible without an engine: each field, and contradictions between fields."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from adapter_store.errors import ProblemList, show
from api.errors import field_name
from api.problem_texts import problem_text
from api.schemas.openai import ChatBody, GenerationBody, SamplingFields
from api.schemas.personas import CHAR, MAX_DEFAULTS_BYTES, USER, Defaults, placeholders, to_text
from api.schemas.speculation import speculation_params
from api.serving.personas import FORM_FIELDS, TOOL_FIELDS
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import check_constrained, check_token_ids
from lorasrv.text.structured_output.grammar import Grammar

INVALID = "invalid_defaults"
TURN = {"role": "user", "content": "Hello"}


class FieldChecks:
    """Collect the faults of one persona's defaults.

    Args:
        vocab_size: number of tokens that the defaults may name.

    Attributes:
        problems: the faults found.
        grammars: grammars that must still be compiled.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.problems = ProblemList()
        self.grammars: list[Grammar] = []

    def fields(self, given: Mapping[str, Any]) -> Defaults:
        """Check defaults, and return the fields that are valid."""
        defaults = self._parsed(given)
        self._size(given)
        self._placeholders(defaults)
        defaults = self._tools(defaults)
        self.sampling(defaults)
        with self.faults_of("speculation"):
            speculation_params(defaults.speculation, None, has_salt=False)
        self._answer(defaults)
        return defaults

    @contextmanager
    def faults_of(self, field: str | None) -> Iterator[None]:
        """Record an InvalidRequest raised in the block as a fault of a field, and continue."""
        try:
            yield
        except InvalidRequest as error:
            self.problems.add(INVALID, error.param or field or "", str(error))

    def _parsed(self, given: Mapping[str, Any]) -> Defaults:
        """Return the fields that are valid on their own; record the others' faults."""
        try:
            return Defaults.model_validate(dict(given))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
        for problem in found:
            field = field_name(("defaults", *problem["loc"])) or show(str(problem["loc"][0]))
            self.problems.add(INVALID, field, problem_text(problem))
        wrong = {problem["loc"][0] for problem in found if problem["loc"]}
        return Defaults.model_validate({name: value for name, value in given.items() if name not in wrong})

    def _size(self, given: Mapping[str, Any]) -> None:
        nbytes = len(to_text(given).encode("utf-8", "replace"))
        if nbytes > MAX_DEFAULTS_BYTES:
            self.problems.add(INVALID, "", f"the defaults have {nbytes} bytes; {MAX_DEFAULTS_BYTES} are the most")

    def _placeholders(self, defaults: Defaults) -> None:
        for place, text in defaults.texts():
            if unknown := [each for each in placeholders(text) if each not in (CHAR, USER)]:
                self.problems.add(INVALID, place, f"{show(unknown[0])} is not {CHAR} or {USER}")
        if found := placeholders(defaults.name or ""):
            self.problems.add(INVALID, "name", f"{show(found[0])}: a name has no placeholders")

    def _tools(self, defaults: Defaults) -> Defaults:
        """Check the tools; return the defaults without them if they are wrong."""
        before = len(self.problems)
        with self.faults_of("tools"):
            _chat(defaults).offered_tools()
        is_right = len(self.problems) == before
        return defaults if is_right else defaults.model_copy(update=dict.fromkeys(TOOL_FIELDS))

    def sampling(self, defaults: Defaults) -> None:
        """Check ranges as for requests: each field alone, then all together."""
        given = {n: value for n in SamplingFields.model_fields if (value := getattr(defaults, n)) is not None}
        is_constrained = _chat(defaults).is_constrained
        before = len(self.problems)
        for name, value in given.items():
            alone = {name: value, "temperature": 0.0} if name.startswith("fsd_") else {name: value}
            with self.faults_of(name):
                self._sample(alone, is_constrained)
        if len(self.problems) == before:
            with self.faults_of(None):
                self._sample(given, is_constrained)

    def _sample(self, fields: Mapping[str, Any], is_constrained: bool) -> None:
        sampling = GenerationBody(**fields).sampling(self._vocab_size)
        check_token_ids(sampling, self._vocab_size)
        if is_constrained:
            check_constrained(sampling)

    def _answer(self, defaults: Defaults) -> None:
        """Check the form of the answer."""
        if defaults.response_format is None:
            return
        with self.faults_of("response_format"):
            grammar = defaults.response_format.grammar("response_format")
            self.grammars += [] if grammar is None else [grammar]
            if grammar is None:
                return
        if defaults.tools and grammar.schema is None:
            self.problems.add(INVALID, "tools", "tools and response_format exclude each other, unless it is JSON")


def _chat(defaults: Defaults) -> ChatBody:
    """Return a chat of one turn with the defaults' answer format and tools."""
    form = {name: getattr(defaults, name) for name in FORM_FIELDS}
    return ChatBody.model_validate({"messages": [TURN]}).model_copy(update=form)
