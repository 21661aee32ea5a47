"""Define the structured output fields: `response_format` of OpenAI, LoRAX and TGI, vLLM's `guided_*` and its newer
`structured_outputs`.

A request may use one of them, or several that say the same.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from api.schemas.base import Body, Items, KnownBody
from lorasrv.errors import InvalidRequest
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.grammar import Grammar

JsonSchema = dict[str, Any] | str | bool


class JsonSchemaFormat(Body):
    """Name a JSON schema. The whole schema is enforced or refused, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Select the output format.

    A schema is in `json_schema` (OpenAI), `schema` (LoRAX) or `value` (TGI). Without a schema, the type `json_object`
    allows any object. The types `json` (a schema in `value`) and `regex` are TGI's.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    value: JsonSchema | None = None

    @property
    def has_grammar(self) -> bool:
        """Return whether the format is not plain text."""
        return self.type != "text"

    def grammar(self, param: str) -> Grammar | None:
        """Build the grammar; None for plain text.

        Args:
            param: field that holds the format.

        Raises:
            InvalidRequest: it is malformed or too large, missing, or given twice.
        """
        openai = None if self.json_schema is None else self.json_schema.schema_
        given = [one for one in (openai, self.schema_, self._tgi_value()) if one is not None]
        if len(given) > 1 or (given and self.type == "text"):
            why = "the type text takes no schema" if self.type == "text" else "send one schema"
            raise InvalidRequest(f"{{param}}: {why}", param=param)
        if self.type == "regex":
            if not isinstance(self.value, str):
                raise InvalidRequest("{param}.value must be a regular expression", param=param)
            return source.regex_of(self.value, param)
        if given:
            return source.json_of(given[0], param)
        if self.type in ("json_schema", "json"):
            where = "json_schema.schema" if self.type == "json_schema" else "value"
            raise InvalidRequest(f"{{param}}.{where} is missing", param=param)
        return source.any_json_object(param) if self.type == "json_object" else None

    def _tgi_value(self) -> Any:
        named = self.type == "json_schema" and isinstance(self.value, dict) and "schema" in self.value
        return self.value["schema"] if named else self.value  # type: ignore[index]


class StructuredOutputs(KnownBody):
    """Set one of vLLM's five constraints."""

    UNSUPPORTED: ClassVar = {
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
        "disable_any_whitespace": (None, False),
        # As closed as it asks for.
        "disable_additional_properties": (None, False, True),
    }

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def has_grammar(self) -> bool:
        """Return whether there is a constraint."""
        given = self.json_, self.regex, self.choice, self.grammar
        return self.json_object is True or any(one is not None for one in given)


class GuidedFields(Body):
    """Define vLLM's structured output fields."""

    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class StructuredFields(GuidedFields):
    """Define the structured output fields of chats and completions."""

    response_format: ResponseFormat | None = None

    @property
    def has_grammar(self) -> bool:
        """Return whether one of the fields asks for more than plain text."""
        formats = self.response_format, self.structured_outputs
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        return any(one is not None and one.has_grammar for one in formats) or any(one is not None for one in guided)

    def grammar(self) -> Grammar | None:
        """Build the grammar of the answer; None if it has none. Call in a thread.

        Raises:
            InvalidRequest: it is malformed or too large, or two differ.
        """
        builders: dict[str, Callable[[Any, str], Grammar | None]] = {
            "response_format": ResponseFormat.grammar,
            "guided_json": source.json_of,
            "guided_regex": source.regex_of,
            "guided_choice": source.choice_of,
            "guided_grammar": source.grammar_of,
            "structured_outputs": _of_structured,
        }
        fields = {name: getattr(self, name) for name in builders}
        wanted = {name: builders[name](value, name) for name, value in fields.items() if value is not None}
        given = {name: grammar for name, grammar in wanted.items() if grammar}
        # Clients of several releases of vLLM send one grammar in two fields.
        first = next(iter(given), "")
        if other := next(
            (name for name in given if replace(given[name], param=given[first].param) != given[first]), None
        ):
            raise InvalidRequest(f"{first} and {other} exclude each other; send one", param=other)
        return next(iter(given.values()), None)


def _of_structured(wanted: StructuredOutputs, param: str) -> Grammar | None:
    grammars = [
        wanted.json_ is not None and source.json_of(wanted.json_, param),
        wanted.regex is not None and source.regex_of(wanted.regex, param),
        wanted.choice is not None and source.choice_of(wanted.choice, param),
        wanted.grammar is not None and source.grammar_of(wanted.grammar, param),
        wanted.json_object is True and source.any_json_object(param),
    ]
    given = [grammar for grammar in grammars if grammar]
    if len(given) > 1:
        raise InvalidRequest(
            "structured_outputs takes one of json, regex, choice, grammar and json_object", param=param
        )
    if not given and wanted.json_object is None:
        why = "structured_outputs needs one of json, regex, choice, grammar and json_object; leave it out for free text"
        raise InvalidRequest(why, param=param)
    return given[0] if given else None
