"""What a request that was not served means to whoever asked: each `Refusal` as an exception."""

from lorasrv.errors import (
    AdapterCold,
    DeadlineUnreachable,
    InvalidRequest,
    LimitExceeded,
    LorasrvError,
    RequestTimeout,
)
from lorasrv.request import Refusal, RequestOutput


def refused(output: RequestOutput) -> LorasrvError | None:
    """Why a request was not served; None if it was, or failed."""
    why, retry_after_s = output.error or "refused", output.retry_after_s or 1.0
    match output.refusal:
        case None:
            return None
        case Refusal.COLD:
            return AdapterCold(why, retry_after_s=retry_after_s)
        case Refusal.LIMIT:
            return LimitExceeded(why, retry_after_s=retry_after_s)
        case Refusal.LATE:
            return DeadlineUnreachable(why, retry_after_s=retry_after_s)
        case Refusal.UNFIT:
            return InvalidRequest(why, param="max_tokens")
        case Refusal.TIMEOUT:
            return RequestTimeout(why)
