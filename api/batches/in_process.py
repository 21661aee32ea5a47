"""Run batch lines on the engine in this process, through the functions behind the routes: same responses, no HTTP."""

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from api.auth.principal import ANYBODY, Caller
from api.batches.results import LineReply
from api.batches.runner import BATCH_PRIORITY, Ask, at_priority, put_off_s
from api.errors import Failure, describe
from api.schemas.openai import ChatBody, CompletionBody, GenerationBody
from api.serving.generation import collect, generate_openai
from api.serving.services import Services
from lorasrv.errors import EngineDead

_LOG = logging.getLogger(__name__)
_BODIES: Mapping[str, type[GenerationBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}


def in_process_client(
    services: Services, caller: Caller = ANYBODY, check: Callable[[str], None] = lambda _: None
) -> Ask:
    """Return a function that sends lines to this server's engine as the caller, at a lower priority than HTTP
    requests.

    Args:
        check: called before each line with the caller's name; raises ApiError if its access has ended.

    Raises (when a line is sent):
        EngineDead: no more lines will be answered.
    """

    async def ask(url: str, body: Mapping[str, Any]) -> LineReply:
        request_id = f"req-{secrets.token_hex(12)}"
        try:
            check(caller.principal)
            parsed = _BODIES[url].model_validate(at_priority(body, BATCH_PRIORITY))
            content, _ = await collect(generate_openai(parsed, services, caller))
        except EngineDead:
            raise
        except ValidationError as error:
            problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
            return _reply(describe(RequestValidationError(problems)), request_id)
        except Exception as error:
            failure = describe(error, path=url)
            if failure.status == 500:
                _LOG.exception("request %s of a batch failed", request_id)
            elif failure.cause:
                _LOG.warning("request %s of a batch failed: %s", request_id, failure.cause)
            return _reply(failure, request_id)
        return LineReply(200, content, request_id)

    return ask


def _reply(failure: Failure, request_id: str) -> LineReply:
    again = put_off_s(failure.status, failure.headers, failure.body)
    return LineReply(failure.status, failure.body, request_id, again)
