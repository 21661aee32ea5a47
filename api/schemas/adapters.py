"""Body of POST /v1/adapters. A field that nobody knows is refused here: it can only be a typing error."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from lorasrv.errors import InvalidRequest


class AdapterBody(BaseModel):
    """An id, the parsed adapter_config.json, and the digest of weights that were uploaded before."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    config: dict[str, Any]
    weights: str
    if_not_exists: bool = False
    alias: str | None = None
    defaults: dict[str, Any] | None = None

    def refuse_unbuilt(self) -> None:
        """Raises: InvalidRequest: `alias` or `defaults` asks for what is not built."""
        for name in ("alias", "defaults"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server yet; leave it out", param=name)
