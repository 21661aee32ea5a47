"""Define the bodies and form fields of /v1/files and /v1/batches."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from api.schemas.base import Body, at_most
from lorasrv.errors import InvalidRequest

WINDOW_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400
_WINDOW = re.compile(r"([0-9]{1,5})([mhd])", re.ASCII)
MIN_AGE_S, MAX_AGE_S = 3600, 30 * 86400
MAX_METADATA = 16
PURPOSES = ("batch",)
Key = Annotated[str, StringConstraints(max_length=64)]
Text = Annotated[str, StringConstraints(max_length=512)]


class Age(Body):
    """Set a file's lifetime in seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_AGE_S, le=MAX_AGE_S)]


class BatchBody(Body):
    """Create a batch from a file."""

    input_file_id: Annotated[str, StringConstraints(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str
    metadata: Annotated[dict[Key, Text], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)] | None = None
    output_expires_after: Age | None = None

    def window_s(self) -> int:
        """Return the completion window in seconds.

        Raises:
            InvalidRequest: it is no time, or longer than batches are kept.
        """
        given = _WINDOW.fullmatch(self.completion_window)
        seconds = int(given[1]) * WINDOW_UNITS_S[given[2]] if given else 0
        if not 0 < seconds <= MAX_WINDOW_S:
            why = "completion_window must be a time in m, h or d, such as 24h, and at most 30d"
            raise InvalidRequest(why, param="completion_window")
        return seconds


def file_purpose(fields: Mapping[str, str]) -> str:
    """Return the purpose of a file.

    Raises:
        InvalidRequest: it is missing or not supported.
    """
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("the form needs a field purpose, which must be batch", param="purpose")
    if purpose not in PURPOSES:
        raise InvalidRequest("purpose must be batch: other files are not supported", param="purpose")
    return purpose


def file_age_s(fields: Mapping[str, str]) -> int | None:
    """Return the file's lifetime in seconds, from `expires_after[anchor]` and `expires_after[seconds]` as OpenAI's
    client sends them; None without them.

    Raises: InvalidRequest.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) <= 9
    if seconds is None or not is_number or not MIN_AGE_S <= int(seconds) <= MAX_AGE_S:
        raise InvalidRequest(
            f"expires_after[seconds] must lie between {MIN_AGE_S} and {MAX_AGE_S}", param="expires_after[seconds]"
        )
    return int(seconds)
