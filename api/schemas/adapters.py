"""Bodies of the routes below /v1/adapters. A field that nobody knows is refused here: it can only be a typing error."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lorasrv.errors import InvalidLimits, InvalidRequest
from lorasrv.limits import Limits

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 600_000
MAX_INT = 2**63 - 1

_Count = Annotated[int, Field(le=MAX_INT)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class AdapterBody(_Body):
    """An id, the parsed adapter_config.json, and the digest of weights that were uploaded before."""

    id: str
    config: dict[str, Any]
    weights: str
    if_not_exists: bool = False
    alias: str | None = None
    defaults: dict[str, Any] | None = None

    def refuse_unbuilt(self) -> None:
        """Raises: InvalidRequest: `alias` or `defaults` asks for what is not built."""
        _refuse_given(self, "alias", "defaults", inert=(None, "", {}))


class LimitsBody(_Body):
    """What one id may have at a time, as `lorasrv.limits.Limits` has it."""

    max_running: _Count | None = None
    max_queued: _Count | None = None
    tokens_per_s: float | None = None
    resident_bytes: _Count | None = None
    weight: float | None = None

    def checked(self) -> dict[str, float]:
        """Those that are given.

        Raises: InvalidRequest: one is out of range; names it.
        """
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        try:
            Limits(**given)
        except InvalidLimits as error:
            raise InvalidRequest(f"limits.{error}", param=f"limits.{error.param}") from None
        return given


class AdapterPatch(_Body):
    """What is to change about an adapter. `limits` are all that the id has from then on; null or {} are none."""

    pinned: bool | None = None
    limits: LimitsBody | None = None
    aliases: Any = None
    rollback: Any = None

    def wanted_limits(self) -> dict[str, float] | None:
        """None: they stay as they are.

        Raises:
            InvalidRequest: a limit is out of range, another field asks for what is not built, or nothing is to change.
        """
        _refuse_given(self, "aliases", "rollback")
        if "limits" in self.model_fields_set:
            return self.limits.checked() if self.limits is not None else {}
        if self.pinned is None:
            raise InvalidRequest("nothing is to change; send pinned or limits", param="pinned")
        return None


class WarmBody(_Body):
    """How long the caller waits for an adapter to be in the pool; 0 only begins."""

    deadline_ms: Annotated[int, Field(ge=0, le=MAX_DEADLINE_MS)] = DEFAULT_DEADLINE_MS


def _refuse_given(body: BaseModel, *names: str, inert: tuple[object, ...] = (None,)) -> None:
    for name in names:
        if getattr(body, name) not in inert:
            raise InvalidRequest(f"{name} is not supported by this server yet; leave it out", param=name)
