"""Poison requests: a request that was in several failed steps is refused for a while.

A request is identified by what would be computed: its key, its adapter's content, its tokens and its sampling without
the seed, as clients change the seed when they repeat a request. Records are in memory and bounded; a restart drops
them. (The idea is the guard of message queues against poison messages.)
"""

import hashlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lorasrv.errors import PoisonRequest
from lorasrv.request import EngineCoreRequest

MAX_FAULTS = 2
MAX_REMEMBERED = 1024
FORGET_AFTER_S = 3600.0


@dataclass(slots=True)
class _Record:
    faults: int
    last_s: float


class PoisonGuard:
    """Count in how many faults each request was. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def check(self, message: EngineCoreRequest) -> None:
        """Refuse a request that was in too many faults.

        Raises:
            PoisonRequest: requests like it were in `MAX_FAULTS` faults.
        """
        if not self._records:
            return
        digest = fingerprint(message)
        with self._lock:
            record = self._records.get(digest)
            if record is not None and self._clock() - record.last_s > FORGET_AFTER_S:
                del self._records[digest]
                record = None
        if record is not None and record.faults >= MAX_FAULTS:
            raise PoisonRequest(
                f"this request has made the engine fail {record.faults} times, and is refused for an hour after the "
                "last time; the server's log says how it failed"
            )

    def record(self, messages: Iterable[EngineCoreRequest]) -> None:
        """Record the requests of one fault; the choices of a request, which are alike, count once."""
        now = self._clock()
        for digest in {fingerprint(message) for message in messages}:
            with self._lock:
                record = self._records.pop(digest, None)
                if record is None or now - record.last_s > FORGET_AFTER_S:
                    record = _Record(0, now)
                record.faults += 1
                record.last_s = now
                self._records[digest] = record
                if len(self._records) > MAX_REMEMBERED:
                    self._records.popitem(last=False)


def fingerprint(message: EngineCoreRequest) -> bytes:
    """Return 16 bytes that identify what would be computed, and for which key."""
    facts = message.principal, message.adapter_key, message.max_tokens, replace(message.sampling, seed=None)
    state = hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16)
    state.update(array("q", message.prompt_token_ids).tobytes())
    return state.digest()
