"""What a request that was not served means to whoever asked: each `Refusal` as an exception."""

from adapter_store.errors import AdapterCorrupt, AdapterError
from lorasrv.errors import (
    AdapterCold,
    AdapterLoadFailed,
    DeadlineUnreachable,
    InvalidRequest,
    LimitExceeded,
    LorasrvError,
    OutOfMemory,
    RequestTimeout,
    StepFailed,
)
from lorasrv.request import Refusal, RequestOutput


def refused(output: RequestOutput) -> LorasrvError | AdapterError | None:
    """Why a request was not served; None if it was, or failed."""
    if output.refusal is None:
        return None
    return _exception(output.refusal, output.error or "refused", output.retry_after_s or 1.0)


def not_loaded(why: str, refusal: Refusal | None) -> LorasrvError | AdapterError:
    """Why an adapter could not be brought in."""
    return AdapterLoadFailed(why) if refusal is None else _exception(refusal, why, 1.0)


def _exception(refusal: Refusal, why: str, retry_after_s: float) -> LorasrvError | AdapterError:
    match refusal:
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
        case Refusal.CORRUPT:
            return AdapterCorrupt(why)
        case Refusal.STEP:
            return StepFailed(why)
        case Refusal.MEMORY:
            return OutOfMemory(why)
