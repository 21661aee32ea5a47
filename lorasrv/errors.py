"""What can go wrong in the engine, for the caller to tell apart.

    LorasrvError
    ├── InvalidRequest (ValueError)        a field of the request is malformed or out of range; names the field
    │   └── ContextLengthExceeded          prompt + max_tokens do not fit the context, or can never fit the pool
    ├── ModelError                         the base model cannot be served
    │   ├── ModelNotFound (FileNotFoundError)
    │   ├── UnsupportedModel (ValueError)  architecture, tensor type or tokenizer that we do not know; lists what we do
    │   ├── UnsupportedFormat (ValueError) no such weight format or group, or not for this model or device
    │   └── CorruptModel (ValueError)      the file is damaged
    ├── ConfigError (ValueError)           a server option is wrong; names the option and the choices
    ├── InvalidLimits (ValueError)         a limit or a weight of an adapter is out of range; names it
    ├── InvalidTrace (ValueError)          a line of recorded traffic is malformed; names the line and the field
    ├── AdapterLoadFailed                  a registered adapter could not be brought into the pool; says why
    ├── AdapterDeleted                     the adapter was deleted while a request was on it, by who would not wait
    ├── RetryLater                         not now; the same may be done in `retry_after_s`
    │   ├── AdapterCold                    the adapter is not in the pool and the caller would not wait
    │   ├── LimitExceeded                  as many requests of the adapter or the key wait as may
    │   ├── DeadlineUnreachable            the request would miss its deadline, so it was not begun
    │   ├── EngineOverloaded               the queue is full
    │   └── VerificationBusy               another adapter is being verified
    ├── RequestTimeout                     the request was not done in the time that it, or the server, allows
    ├── VerificationUnavailable            an adapter cannot be verified here: a package or memory is missing
    ├── VerificationFailed                 a verification has ended without a verdict; says why
    ├── StepFailed                         the request could not be computed, though others could
    ├── OutOfMemory                        not even it alone fits into memory now; `retry_after_s`
    ├── PoisonRequest                      a request like it could not be computed, twice; it is not tried again for now
    ├── DeviceLost                         the GPU's context is broken: the engine ends
    └── EngineDead (RuntimeError)          the engine thread has ended; nothing will be answered any more
        └── ServerStopping                 the server was told to end, before the request was done

`adapter_store.errors` has a root of its own, as a leaf cannot import upward. A test gives each class an HTTP status.
"""

import re
from collections.abc import Mapping
from typing import Self


class LorasrvError(Exception):
    """Root of everything the engine raises on purpose."""


class InvalidRequest(LorasrvError, ValueError):
    """A field of the request is malformed or out of range.

    Args:
        message: what is wrong and how to mend it; `{param}` in it stands for the field's name.
        param: the field, by the engine's name for it, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message.replace("{param}", param or "the field"))
        self.param = param
        self._message = message

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the same error in the words of a protocol that has other names for some fields."""
        return type(self)(self._message, param=names.get(self.param or "", self.param))


class ContextLengthExceeded(InvalidRequest):
    """The request can never fit: the context length, or the whole page pool, is too small for it."""


class ModelError(LorasrvError):
    """The base model cannot be served."""


class ModelNotFound(ModelError, FileNotFoundError):
    """Nothing to load at the given path or under the given name."""


class UnsupportedModel(ModelError, ValueError):
    """An architecture, tensor type or tokenizer that we do not know. The message lists the known ones."""


class UnsupportedFormat(ModelError, ValueError):
    """The base cannot be kept in this weight format or group. The message names the option and the choices."""


class CorruptModel(ModelError, ValueError):
    """The checkpoint is damaged: truncated, missing tensors, or shapes that contradict its own header."""


class ConfigError(LorasrvError, ValueError):
    """A server option is wrong. The message names the option, the value and the choices."""


class InvalidLimits(LorasrvError, ValueError):
    """A limit or a weight is out of range. `param` is its name on the wire."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class InvalidTrace(LorasrvError, ValueError):
    """Recorded traffic cannot be read. The message names the file, the line and the field."""


class RetryLater(LorasrvError):
    """What was asked cannot be done now; the same may be done in `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdapterLoadFailed(LorasrvError):
    """A registered adapter could not be brought into the pool. Fails its own requests only."""


class AdapterDeleted(LorasrvError):
    """The adapter was deleted while the request was on it, and whoever did would not wait. What came is no answer."""


class AdapterCold(RetryLater):
    """The adapter is not in the pool and the request would not wait. It is brought in; try again in `retry_after_s`."""


class LimitExceeded(RetryLater):
    """The adapter, or the key, has as many requests waiting as it may. Says which limit, of whom."""


class RequestTimeout(LorasrvError):
    """The request was not done, or not begun, in the time that it or the server allows. What came is no answer."""


class DeadlineUnreachable(RetryLater):
    """The request is predicted to miss its deadline, so it was refused before anything was spent on it."""


class EngineOverloaded(RetryLater):
    """The queue has no place for the request now."""


class VerificationUnavailable(LorasrvError):
    """An adapter cannot be verified here. The message says which package, or how much memory, is missing."""


class VerificationBusy(RetryLater):
    """Another adapter is being verified; one at a time."""


class VerificationFailed(LorasrvError):
    """A verification has ended without a verdict. Says why; holds no path."""


class EngineDead(LorasrvError, RuntimeError):
    """The engine thread has ended; nothing will be answered any more."""


class StepFailed(LorasrvError):
    """The request could not be computed: something of ours has failed, and not for others. The log says what."""


class OutOfMemory(LorasrvError):
    """The request does not fit into what memory the machine has left, not even alone; try again later."""

    retry_after_s = 10.0


class PoisonRequest(LorasrvError):
    """Requests like it have failed in the engine, so it is not computed again for a while."""


class DeviceLost(LorasrvError):
    """The device does nothing any more (a sticky CUDA error); only a new process can."""


class ServerStopping(EngineDead):
    """The server was told to end, and the request was not done in time, or came too late."""


def name_of(kind: type[BaseException]) -> str:
    """An exception's class as labels spell it: `adapter_cold`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
