"""What routes work with, put into `app.state` by `create_app`; no module holds any of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from adapter_store.store import AdapterStore
from api.limits import LimitKeeper
from api.settings import ServerSettings
from lorasrv.verify.verifier import Verifier

if TYPE_CHECKING:
    # At run time the engine comes from outside: importing it here would bring torch to whoever imports a route.
    from lorasrv.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Services:
    """One server's parts. `started_s` is Unix time."""

    engine: "AsyncEngine"
    store: AdapterStore
    settings: ServerSettings
    limits: LimitKeeper
    verifier: Verifier
    started_s: int

    @property
    def base_name(self) -> str:
        """What clients call the base."""
        return self.settings.served_model_name or self.engine.model_name


def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


ServicesDep = Annotated[Services, Depends(get_services)]
