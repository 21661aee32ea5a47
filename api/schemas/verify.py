"""Body of POST /v1/adapters/{id}:verify."""

from typing import Annotated

from pydantic import Field

from api.schemas.body import ClosedBody, Items
from lorasrv.verify.job import MAX_PROMPTS
from lorasrv.verify.verifier import DEFAULT_TIMEOUT_S

MAX_TIMEOUT_S = 3600
"""While one adapter is verified, nobody else's is."""
MAX_PROMPT_CHARS = 16_384


class VerifyBody(ClosedBody):
    """What to verify with: `prompts` as a user would write them, None for the built-in ones.

    `ignore_memory`: begin also where memory is likely to run out. `stream`: tell progress as events.
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
