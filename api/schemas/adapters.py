"""Define the bodies of the routes below /v1/adapters, and of vLLM's two routes that load and unload adapters.

Bodies below /v1/adapters refuse unknown fields, which can only be typing errors. Bodies of vLLM's routes ignore them,
because vLLM's clients send more fields.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from adapter_store.errors import InvalidAlias, show_name
from adapter_store.quota import MAX_PER_ID
from adapter_store.registry.records import Change
from adapter_store.registry.references import AliasTarget, target_from_json
from adapter_store.spec import BF16
from api.schemas.base import Body, ClosedBody, Items, KnownBody, at_most
from lorasrv.config import Limits
from lorasrv.errors import InvalidLimits, InvalidRequest
from lorasrv.offline.verify.job import MAX_PROMPTS
from lorasrv.offline.verify.verifier import DEFAULT_TIMEOUT_S

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 600_000
MAX_INT = 2**63 - 1
_Count = Annotated[int, Field(le=MAX_INT)]
_OF_WEIGHTS = ("stored", "allow_partial", "allow_drift", "tokenizer")


class AdapterBody(ClosedBody):
    """Register uploaded weights: an id, the parsed adapter_config.json, and the weights' digest.

    `defaults` apply to fields that requests leave out; an id with defaults needs no weights. `alias` is moved to the
    new version. `stored` is the storage format, by default the server's (`--adapter-storage`); with `allow_drift`,
    int8 is accepted regardless of how much it changes the adapter. `tokenizer` is the digest of an uploaded
    tokenizer.json with the tokens that the adapter adds to the base's.
    """

    id: str
    config: dict[str, Any] | None = None
    weights: str | None = None
    tokenizer: str | None = None
    if_not_exists: bool = False
    allow_partial: bool = False
    stored: Literal["bf16", "int8"] | None = None
    allow_drift: bool = False
    alias: str | None = None
    defaults: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if (self.config is None) != (self.weights is None) or not (self.weights or self.defaults):
            missing = "config" if self.config is None and self.weights is not None else "weights"
            why = "send config and weights together; defaults alone make a persona of the base"
            raise PydanticCustomError("missing_weights", why, {"field": missing})
        if self.weights is None and (of_weights := [name for name in _OF_WEIGHTS if getattr(self, name)]):
            why = "belongs to weights; send config and weights, too, or leave it out"
            raise PydanticCustomError("missing_weights", why, {"field": of_weights[0]})
        if self.allow_drift and self.stored == BF16:
            why = "belongs to int8, which is the form that changes weights; leave it out, or set stored to int8"
            raise PydanticCustomError("unsupported", why, {"field": "allow_drift"})
        return self


class LimitsBody(ClosedBody):
    """Limit the resources that one id may use at a time; the fields are those of `lorasrv.config.Limits`."""

    max_running: _Count | None = None
    max_queued: _Count | None = None
    tokens_per_s: float | None = None
    resident_bytes: _Count | None = None
    weight: float | None = None

    def checked(self) -> dict[str, float]:
        """Return the limits that are set.

        Raises:
            InvalidRequest: a limit is out of range; the message names it.
        """
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        try:
            Limits(**given)
        except InvalidLimits as error:
            raise InvalidRequest(f"limits.{error}", param=f"limits.{error.param}") from None
        return given


class AdapterPatch(ClosedBody):
    """Change an adapter. `limits` replaces all limits of the id; null or {} removes them.

    `version` becomes the current version. `aliases` maps each alias to a version, to two versions with shares
    ({"3": 0.9, "4": 0.1}), or to null, which removes the alias. Aliases that are not named stay.
    """

    pinned: bool | None = None
    limits: LimitsBody | None = None
    aliases: Annotated[dict[str, Any], at_most(MAX_PER_ID)] | None = None
    version: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None

    def wanted(self) -> Change | None:
        """Return the change in the store; None if only the pin changes.

        Raises:
            InvalidRequest: a limit or an alias is invalid, or the patch is empty.
        """
        limits: dict[str, float] | None = None
        if "limits" in self.model_fields_set:
            limits = self.limits.checked() if self.limits is not None else {}
        change = Change(self.version, _targets(self.aliases or {}), limits)
        if change != Change():
            return change
        if self.pinned is None:
            raise InvalidRequest("the body changes nothing; send pinned, limits, aliases or version", param="pinned")
        return None


def _targets(aliases: dict[str, Any]) -> dict[str, AliasTarget | None]:
    try:
        targets = {alias: None if to is None else target_from_json(alias, to) for alias, to in aliases.items()}
        Change(aliases=targets).check()
    except InvalidAlias as error:
        raise InvalidRequest(str(error), param=f"aliases.{show_name(error.alias)}") from None
    return targets


class WarmBody(ClosedBody):
    """Set how long to wait for an adapter to be resident; 0 starts loading and returns at once."""

    deadline_ms: Annotated[int, Field(ge=0, le=MAX_DEADLINE_MS)] = DEFAULT_DEADLINE_MS


MAX_TIMEOUT_S = 3600
"""Only one adapter is verified at a time, so the next one may wait this long."""
MAX_PROMPT_CHARS = 16_384


class VerifyBody(ClosedBody):
    """Configure a verification. `prompts` are as a user would write them, by default the built-in ones.

    `ignore_memory` starts it even if memory is likely to run out. `stream` reports progress as events.
    """

    prompts: (
        Annotated[
            Items[Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
        | None
    ) = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = DEFAULT_TIMEOUT_S
    ignore_memory: bool = False
    stream: bool = False


class LoadBody(KnownBody):
    """Register a folder; with `load_inplace`, an existing id gets a new version."""

    UNSUPPORTED: ClassVar = {"pinned": (None, False), "is_3d_lora_weight": (None, False)}

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(Body):
    """Delete an id with all its versions."""

    lora_name: str
