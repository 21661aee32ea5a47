"""Define the structured output fields: OpenAI's `response_format`, vLLM's `guided_*` and its newer
`structured_outputs`.

A request may use one of them.
"""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from api.schemas.base import Body, Items
from api.schemas.unsupported import refuse_unless_inert
from lorasrv.errors import InvalidRequest
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.grammar import Grammar

JsonSchema = dict[str, Any] | str | bool
_INERT_IN_STRUCTURED = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
}


class JsonSchemaFormat(Body):
    """Name a JSON schema. The whole schema is enforced or refused, whether `strict` is set or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Select OpenAI's output format; `json_object` means any object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """Set one of vLLM's five constraints."""

    model_config = ConfigDict(extra="allow")

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(Body):
    """Define the structured output fields of both routes."""

    response_format: ResponseFormat | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammar(self) -> Grammar | None:
        """Build the grammar of the answer, None without one (some clients send empty strings). Call in a thread.

        Raises:
            InvalidRequest: it is malformed or too large, or there are two.
        """
        wanted = {
            "response_format": self.response_format and _of_format(self.response_format),
            "guided_json": self.guided_json not in (None, "") and source.json_of(self.guided_json, "guided_json"),
            "guided_regex": self.guided_regex and source.regex_of(self.guided_regex, "guided_regex"),
            "guided_choice": self.guided_choice and source.choice_of(self.guided_choice, "guided_choice"),
            "guided_grammar": self.guided_grammar and source.grammar_of(self.guided_grammar, "guided_grammar"),
            "structured_outputs": self.structured_outputs and _of_structured(self.structured_outputs),
        }
        given = {name: grammar for name, grammar in wanted.items() if grammar}
        if len(given) > 1:
            first, second = list(given)[:2]
            raise InvalidRequest(f"{first} and {second} exclude each other; send one", param=second)
        return next(iter(given.values()), None)


def _of_format(wanted: ResponseFormat) -> Grammar | None:
    param = "response_format"
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return source.any_json_object(param)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest("response_format.json_schema.schema is missing", param=param)
    return source.json_of(wanted.json_schema.schema_, param)


def _of_structured(wanted: StructuredOutputs) -> Grammar | None:
    param = "structured_outputs"
    refuse_unless_inert(wanted.model_extra, _INERT_IN_STRUCTURED, within=param)
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
    return given[0] if given else None
