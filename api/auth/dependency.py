"""The caller of a request, as a dependency of FastAPI's routes."""

from typing import Annotated

from fastapi import Depends, Request

from api.auth.principal import Caller, caller_of


async def get_caller(request: Request) -> Caller:
    return caller_of(request.scope)


CallerDep = Annotated[Caller, Depends(get_caller)]
