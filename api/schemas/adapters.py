"""Bodies of the routes below /v1/adapters. A field that nobody knows is refused here: it can only be a typing error."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lorasrv.errors import InvalidRequest

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 600_000


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


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


class AdapterPatch(_Body):
    """What is to change about an adapter."""

    pinned: bool | None = None
    aliases: Any = None
    limits: Any = None
    rollback: Any = None

    def wanted_pin(self) -> bool:
        """Raises: InvalidRequest: another field asks for what is not built, or nothing is to change."""
        _refuse_given(self, "aliases", "limits", "rollback")
        if self.pinned is None:
            raise InvalidRequest("nothing is to change; send pinned: true or pinned: false", param="pinned")
        return self.pinned


class WarmBody(_Body):
    """How long the caller waits for an adapter to be in the pool; 0 only begins."""

    deadline_ms: Annotated[int, Field(ge=0, le=MAX_DEADLINE_MS)] = DEFAULT_DEADLINE_MS


def _refuse_given(body: BaseModel, *names: str, inert: tuple[object, ...] = (None,)) -> None:
    for name in names:
        if getattr(body, name) not in inert:
            raise InvalidRequest(f"{name} is not supported by this server yet; leave it out", param=name)
