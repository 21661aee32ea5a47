"""What bodies have in common: strict types, and an end to looking for what is wrong with them.

Bodies are validated on the event loop, and pydantic collects every error that it finds: of a million wrong values, a
million for each branch of a union, which takes half a minute and gigabytes. So a list is left at its first wrong item
(`Items`), and objects are not looked into where they have more entries than could be meant (`at_most`). A test goes
through all schemas for lists and objects without.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
MAX_FIELDS = 64


def at_most(entries: int) -> BeforeValidator:
    """Refuses an object of more entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_many_entries", f"must have at most {entries} entries")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Strictly typed; NaN and infinity are no numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ClosedBody(BaseModel):
    """As `Body`, and a field that nobody knows is refused: it can only be a typing error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Each of them that is unknown would be an error of its own."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_entries", f"must have at most {MAX_FIELDS} fields")
        return value
