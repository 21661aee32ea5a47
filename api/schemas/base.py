"""Define the base classes of bodies, which have strict types and bound the work of validation.

Bodies are validated on the event loop, and pydantic collects every error it finds: a million wrong values give a
million errors for each branch of a union, which takes half a minute and gigabytes. Therefore validation of a list stops
at its first wrong item (`Items`), and objects with more entries than any valid one are refused unread (`at_most`). A
test checks that every list and object in the schemas has such a bound.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_FIELDS = 64


def at_most(entries: int) -> BeforeValidator:
    """Return a validator that refuses an object with more entries before validating any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_many_entries", f"must have at most {entries} entries")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Base of bodies: strictly typed, without NaN and infinity."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class KnownBody(Body):
    """Base of objects that have more fields on other servers. Those fields are refused, unless the value has no effect.

    Fields that no server knows are ignored, because clients send many.
    """

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Maps refused fields to their values without effect. Fields that a subclass declares are supported."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in sorted((cls.UNSUPPORTED.keys() & value.keys()) - cls.model_fields.keys()):
                if not any(_same(value[name], inert) for inert in cls.UNSUPPORTED[name]):
                    raise PydanticCustomError("unsupported", "not supported here; leave it out", {"field": name})
        return value


def _same(value: Any, inert: Any) -> bool:
    """Return whether JSON values are equal; unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(inert, bool) and bool(value == inert)


class ClosedBody(BaseModel):
    """Base of bodies that refuse unknown fields, which can only be typing errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Bound the number of fields, because each unknown field adds an error."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_entries", f"an object here must have at most {MAX_FIELDS} fields")
        return value
