"""Define the engine's errors.

    LorasrvError
    ├── InvalidRequest (ValueError)        a field of the request is malformed or out of range; names the field
    │   └── ContextLengthExceeded          prompt + max_tokens do not fit the context, or can never fit the pool
    ├── ModelError                         the base model cannot be served
    │   ├── ModelNotFound (FileNotFoundError)
    │   ├── UnsupportedModel (ValueError)  unknown architecture, tensor type or tokenizer; lists the known ones
    │   ├── UnsupportedFormat (ValueError) unknown weight format or group, or not for this model or device
    │   └── CorruptModel (ValueError)      the file is damaged
    ├── ConfigError (ValueError)           a server option is wrong; names the option and the choices
    ├── NotEnoughMemory                    the options need more memory than the machine has; has the numbers
    ├── InvalidLimits (ValueError)         a limit or weight of an adapter is out of range; names it
    ├── InvalidTrace (ValueError)          a line of recorded traffic is malformed; names the line and the field
    ├── AdapterLoadFailed                  a registered adapter could not be brought into the pool; says why
    ├── AdapterDeleted                     the adapter was deleted while a request was on it, by who would not wait
    ├── RetryLater                         not now; the same may be done in `retry_after_s`
    │   ├── AdapterCold                    the adapter is not in the pool and the caller would not wait
    │   ├── LimitExceeded                  as many requests of the adapter or the key wait as may
    │   ├── DeadlineUnreachable            the request would miss its deadline, so it was not begun
    │   ├── EngineOverloaded               the queue is full
    │   ├── NoReplicaReady                 no replica can take the request now
    │   └── VerificationBusy               another adapter is being verified
    ├── ReplicaLost                        the replica that computed the answer is gone, and no other could go on
    ├── RequestTimeout                     the request was not done in the time that it, or the server, allows
    ├── NoEngine                           the server keeps a store and computes nothing
    ├── PagesDiffer                        a peer's keys and values are not those of this server
    ├── LeaseEnded                         pages are not held for a peer any more
    ├── VerificationUnavailable            an adapter cannot be verified here: a package or memory is missing
    ├── VerificationFailed                 a verification has ended without a verdict; says why
    ├── StepFailed                         the request could not be computed, though others could
    ├── OutOfMemory                        not even this request alone, or its adapter, fits now; `retry_after_s`
    ├── PoisonRequest                      a request like it failed twice; it is not tried again for now
    ├── DeviceLost                         the GPU's context is broken: the engine ends
    └── EngineDead (RuntimeError)          the engine thread has ended; no request will be answered
        └── ServerStopping                 the server was told to stop before the request was done

`adapter_store.errors` has its own root, as that package cannot import this one. A test checks that each class has an
HTTP status.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self


class LorasrvError(Exception):
    """Root of the errors that the engine raises on purpose."""


class InvalidRequest(LorasrvError, ValueError):
    """A field of the request is malformed or out of range.

    Args:
        message: what is wrong and how to fix it; `{param}` in it stands for the field's name.
        param: the engine's name of the field, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message.replace("{param}", param or "the field"))
        self.param = param
        self._message = message

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the same error for a protocol that has other names for some fields. A part of such a field, such as
        `messages[0].role`, gets the name of the whole field, unless the part has one.
        """
        part = self.param or ""
        return type(self)(self._message, param=names.get(part) or names.get(part.partition("[")[0], self.param))


class ContextLengthExceeded(InvalidRequest):
    """Report a request that can never fit: the context length, or the whole page pool, is too small."""


class ModelError(LorasrvError):
    """Report that the base model cannot be served."""


class ModelNotFound(ModelError, FileNotFoundError):
    """Report that there is nothing to load at the given path or under the given name."""


class UnsupportedModel(ModelError, ValueError):
    """Report an unknown architecture, tensor type or tokenizer. The message lists the known ones."""


class CorruptModel(ModelError, ValueError):
    """Report a damaged checkpoint: truncated, missing tensors, or shapes that contradict its own header."""


class ConfigError(LorasrvError, ValueError):
    """Report a wrong server option. The message names the option, the value and the choices."""


class UnsupportedFormat(ModelError, ConfigError):
    """Report a weight format or group that the base cannot use. The message names the option and the choices."""


class NotEnoughMemory(LorasrvError):
    """Report that the machine has less free memory than the options need. The message has the numbers."""


class InvalidLimits(LorasrvError, ValueError):
    """Report a limit or weight out of range. `param` is its name on the wire."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class InvalidTrace(LorasrvError, ValueError):
    """Report unreadable recorded traffic. The message names the file, the line and the field."""


class RetryLater(LorasrvError):
    """Report that a request cannot be done now; the same request may succeed in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AdapterLoadFailed(LorasrvError):
    """Report a registered adapter that could not be loaded into the pool. Fails its own requests only."""


class AdapterLoadTimeout(AdapterLoadFailed):
    """Report an adapter that the disk or the registry did not return in time, or that was not read because the disk or
    registry hangs."""


class AdapterDeleted(LorasrvError):
    """Report that the adapter was deleted by force while the request used it. Partial output is not an answer."""


class AdapterCold(RetryLater):
    """Report that the adapter is not resident and the request does not wait. Loading has started; retry in
    `retry_after_s`.
    """


class LimitExceeded(RetryLater):
    """Report that the adapter or the key has as many waiting requests as allowed. Names the limit and its owner."""


class ReplicaLost(LorasrvError):
    """Report that the replica of an answer is gone and no other could begin or continue it. Partial output is not an
    answer.
    """


class RequestTimeout(LorasrvError):
    """Report a request that was not finished within its own or the server's time limit. Partial output is not an
    answer."""


class DeadlineUnreachable(RetryLater):
    """Report a request that is predicted to miss its deadline, refused before any work was spent on it."""


class EngineOverloaded(RetryLater):
    """Report that the queue has no place for the request now."""


class NoReplicaReady(RetryLater):
    """Report that no replica can take the request now. Has the number of known replicas."""


class NoEngine(LorasrvError):
    """Report a request to compute something on a server that only keeps a store."""


class SnapshotFailure(LorasrvError):
    """Report that a snapshot of a persona's prompt was not made, and why."""


class PagesDiffer(LorasrvError):
    """Report that a peer's keys and values are not those of this server. Names what differs."""


class LeaseEnded(LorasrvError):
    """Report that pages are no longer held for a peer."""


class PeerFailed(Exception):
    """Report that a peer returned no page.

    Args:
        reason: one word, for the counters.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class VerificationUnavailable(LorasrvError):
    """Report that adapters cannot be verified here. The message says which package, or how much memory, is missing."""


class VerificationBusy(RetryLater):
    """Report that another adapter is being verified; one runs at a time."""


class VerificationFailed(LorasrvError):
    """Report a verification that ended without a verdict. The message says why, and contains no path."""


class EngineDead(LorasrvError, RuntimeError):
    """Report that the engine has ended, or a process that computes a part of its model; no request will be answered."""


class StepFailed(LorasrvError):
    """Report an internal failure that affects only this request. The log has the cause."""


class OutOfMemory(LorasrvError):
    """Report that the request, even alone, or its adapter does not fit into the machine's free memory; retry later."""

    retry_after_s = 10.0


class PoisonRequest(LorasrvError):
    """Report that similar requests failed in the engine, so this one is not computed for a while."""


class DeviceLost(LorasrvError):
    """Report a device that no longer responds (a sticky CUDA error); only a new process recovers."""


class ServerStopping(EngineDead):
    """Report that the server was told to stop before the request was done, or before it arrived."""


def name_of(kind: type[BaseException]) -> str:
    """Return an exception class's name as labels spell it, such as `adapter_cold`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def to_install(extra: str) -> str:
    """Return how to install the packages of an extra (pyproject.toml), for messages; lorasrv is in no package index."""
    return f"pip install -e '.[{extra}]' in lorasrv's checkout"


@contextmanager
def naming_file(file: str) -> Iterator[None]:
    """Prefix error messages about a model with the name of its file; "" adds nothing."""
    try:
        yield
    except (CorruptModel, UnsupportedModel) as error:
        raise type(error)(f"{file}: {error}" if file else str(error)) from None
